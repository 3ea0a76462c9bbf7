"""The control API's side of the server: routes, keys, leases, telemetry."""
