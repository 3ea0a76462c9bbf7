"""Truncated importance sampling: what has become likelier counts more, but no more than the bound."""

from torch import Tensor

from leyden.rl.hyperparameters import Hyperparameters


def truncated(ratio: Tensor, terms: Hyperparameters) -> Tensor:
    """w = min(r, high)."""
    return ratio.clamp(max=terms.correction_high)
