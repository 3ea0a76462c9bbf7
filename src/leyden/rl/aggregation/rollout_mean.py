"""Tokens are averaged inside a rollout, then over rollouts: a long rollout counts as much as a short one."""

from leyden.config import Hyperparameters
from leyden.rl.aggregation import Lengths, count_rollouts
from leyden.rl.registry import aggregation


@aggregation(divides_by="rollouts")
def rollout_mean(lengths: Lengths, hyperparameters: Hyperparameters) -> list[list[float]]:
    """w = 1 / (rollouts x tokens of the rollout)."""
    count = count_rollouts(lengths)
    return [[1 / (count * sum(calls)) if any(calls) else 0.0] * len(calls) for calls in lengths]
