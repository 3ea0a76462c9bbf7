"""Execute attempts for a worker: Python agents in host processes, commands, HTTP endpoints."""
