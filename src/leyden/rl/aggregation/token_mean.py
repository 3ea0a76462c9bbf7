"""Every token counts the same: long rollouts count more."""

from leyden.config import Hyperparameters
from leyden.rl.aggregation import Lengths
from leyden.rl.registry import aggregation


@aggregation(divides_by="tokens")
def token_mean(lengths: Lengths, hyperparameters: Hyperparameters) -> list[list[float]]:
    """w = 1 / tokens."""
    weight = 1 / max(sum(map(sum, lengths)), 1)
    return [[weight] * len(calls) for calls in lengths]
