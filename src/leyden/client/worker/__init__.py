"""Leases rollouts, runs them through runners, scores them and reports how each attempt ended."""
