"""Child processes of a worker: their environment without its secrets, and reports of their crashes."""
