"""Turns episodes into micro-batches: selects samples, computes their advantages and lays out their tokens."""
