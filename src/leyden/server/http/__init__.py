"""HTTP: connections, limits, bodies, streams and the application."""
