"""Reward functions, called by the worker: for one attempt, for a whole group, and again later."""
