"""Masked importance sampling: tokens on which the two policies disagree too much are not trained on."""

from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.registry import correction


@correction(reads=("correction_level", "correction_low", "correction_high"))
def masked(ratio: Tensor, hyperparameters: Hyperparameters) -> Tensor:
    """w = r if low <= r <= high, otherwise 0."""
    return ratio.where((ratio >= hyperparameters.correction_low) & (ratio <= hyperparameters.correction_high), 0.0)
