"""Masked importance sampling: what the two policies disagree on too much is not learnt from."""

from torch import Tensor

from leyden.rl.hyperparameters import Hyperparameters


def masked(ratio: Tensor, terms: Hyperparameters) -> Tensor:
    """w = r where low <= r <= high, otherwise 0."""
    return ratio.where((ratio >= terms.correction_low) & (ratio <= terms.correction_high), 0.0)
