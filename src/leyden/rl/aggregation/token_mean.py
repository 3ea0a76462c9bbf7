"""Every token counts the same: long rollouts count more."""

from leyden.rl.aggregation import Lengths
from leyden.rl.hyperparameters import Hyperparameters


def token_mean(lengths: Lengths, terms: Hyperparameters) -> list[list[float]]:
    """w = 1 / tokens."""
    weight = 1 / max(sum(map(sum, lengths)), 1)
    return [[weight] * len(calls) for calls in lengths]
