"""Truncated importance sampling: the ratio is the weight, up to a bound."""

from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.registry import correction


@correction(reads=("correction_level", "correction_high"))
def truncated(ratio: Tensor, hyperparameters: Hyperparameters) -> Tensor:
    """w = min(r, high)."""
    return ratio.clamp(max=hyperparameters.correction_high)
