"""Child processes: how they are started, guarded, logged, started again and ended."""
