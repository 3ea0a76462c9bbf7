"""Leases rollouts, has runners execute them, scores them and reports how each attempt ended."""
