"""How two policies differ on sampled tokens: probability ratios, and estimates of KL(current || reference).

With d = log p_current - log p_reference, all three have about the same value. As a penalty on the reward, k1 is
unbiased. In a loss, the gradient of k2 is that of the KL; the gradient of k1 is 0 in expectation, and that of k3 is the
gradient of the KL in the other direction.
"""

from collections.abc import Callable

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


def k1(current: Tensor, reference: Tensor) -> Tensor:
    """d: unbiased, of either sign."""
    return current - reference


def k2(current: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2: never negative, biased if the policies are far apart."""
    return 0.5 * (current - reference) ** 2


def k3(current: Tensor, reference: Tensor) -> Tensor:
    """e^-d - 1 + d: never negative and unbiased."""
    gap = reference - current
    return ratio(gap) - 1 - gap


Estimate = Callable[[Tensor, Tensor], Tensor]
ESTIMATES: dict[str, Estimate] = {"k1": k1, "k2": k2, "k3": k3}
