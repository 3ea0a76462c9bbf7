"""How much likelier one policy makes something than another does: the exponential of a gap of logprobs."""

import torch
from torch import Tensor

_FURTHEST = 20.0
"""Gaps beyond count as this: e^20 is past every bound of a clip or a correction, and its square is no infinity."""


def ratio(gap: Tensor) -> Tensor:
    """p / q of log p - log q."""
    return torch.exp(gap.clamp(-_FURTHEST, _FURTHEST))


def total(of: Tensor, unit: Tensor) -> Tensor:
    """The sum over the tokens of each unit (a call, a rollout), for each unit by its number."""
    units = int(unit.max()) + 1 if len(unit) else 0
    return of.new_zeros(units).index_add(0, unit, of)
