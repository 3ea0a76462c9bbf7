"""Probability ratios of two policies: the exponential of a difference of logprobs."""

import torch
from torch import Tensor

_MAX_GAP = 20.0
"""Larger gaps are clamped to this: e^20 exceeds every clip or correction bound, and its square is still finite."""


def ratio(gap: Tensor) -> Tensor:
    """Compute p / q from log p - log q."""
    return torch.exp(gap.clamp(-_MAX_GAP, _MAX_GAP))


def total(of: Tensor, unit: Tensor) -> Tensor:
    """Sum over the tokens of each unit (a call, a rollout); indexed by the unit's number."""
    units = int(unit.max()) + 1 if len(unit) else 0
    return of.new_zeros(units).index_add(0, unit, of)
