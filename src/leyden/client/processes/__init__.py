"""Child processes of a worker: their environment without its secrets, their limits, their crashes and their ends."""
