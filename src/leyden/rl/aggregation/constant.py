"""The sum over tokens is divided by a constant, so that lengths do not change a token's weight (Dr. GRPO)."""

from leyden.config import Hyperparameters
from leyden.rl.aggregation import Lengths, count_rollouts
from leyden.rl.registry import aggregation


@aggregation(reads=("length",), requires=("length",), divides_by="rollouts")
def constant(lengths: Lengths, hyperparameters: Hyperparameters) -> list[list[float]]:
    """w = 1 / (rollouts x length)."""
    assert hyperparameters.length is not None, "`constant` requires `length`"
    weight = 1 / (max(count_rollouts(lengths), 1) * hyperparameters.length)
    return [[weight] * len(calls) for calls in lengths]
