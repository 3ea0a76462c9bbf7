"""The process that runs Python agents, many attempts at once, without the worker's key."""
