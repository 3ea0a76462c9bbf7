"""The host process: runs Python agents, many attempts concurrently, without the worker's key."""
