"""Files beside the database: locks, checksums, the engine's report."""
