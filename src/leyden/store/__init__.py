"""The durable record of runs, rollouts, calls and rewards, in SQLite or PostgreSQL. Imports nothing of the server."""
