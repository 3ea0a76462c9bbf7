"""Tokens are added up and divided by a constant: how long anything turned out weighs on nothing (Dr. GRPO)."""

from leyden.rl.aggregation import Lengths, rollouts
from leyden.rl.hyperparameters import Hyperparameters


def constant(lengths: Lengths, terms: Hyperparameters) -> list[list[float]]:
    """w = 1 / (rollouts x length)."""
    assert terms.length is not None, "a configuration that asks for `constant` says by what to divide"
    weight = 1 / (max(rollouts(lengths), 1) * terms.length)
    return [[weight] * len(calls) for calls in lengths]
