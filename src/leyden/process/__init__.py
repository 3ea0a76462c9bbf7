"""Processes of this machine: their descendants, guardian, restart limit and log."""
