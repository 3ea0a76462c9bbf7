"""Tokens are averaged inside a rollout, then over rollouts: a long rollout counts as much as a short one."""

from leyden.rl.aggregation import Tokens


def rollout_mean(tokens: Tokens) -> list[list[float]]:
    """w = 1 / (rollouts x tokens of the rollout)."""
    rollouts = sum(1 for calls in tokens if sum(calls))
    return [[1.0 / (rollouts * sum(calls)) if sum(calls) else 0.0] * len(calls) for calls in tokens]
