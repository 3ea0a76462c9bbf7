"""Child processes of a worker: their environment without its secrets, their limits and their crashes."""
