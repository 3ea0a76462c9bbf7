"""What happened, durably: SQLite by default, PostgreSQL by URL."""
