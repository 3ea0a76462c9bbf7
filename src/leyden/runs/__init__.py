"""Runs on disk: their folders, checkpoints and stored record."""
