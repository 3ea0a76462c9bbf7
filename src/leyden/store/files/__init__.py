"""Files beside the database: locks, the engine's report."""
