"""One attempt in the worker: its lease, what the agent printed and returned, and how it ended."""
