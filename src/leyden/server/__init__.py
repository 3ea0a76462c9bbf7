"""The Lightning Server: an HTTP API over the store, and a gateway for model calls. Needs no torch."""
