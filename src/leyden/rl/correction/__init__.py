"""Corrections weigh tokens that another policy sampled: the engine computes differently, or has older weights.

A correction takes the ratio of the proximal policy to the sampler for each token, at a level (token, call or rollout),
and returns the weight of the token's loss; no gradient flows through it. Unbounded and at the rollout level it is
unbiased; bounds and lower levels trade bias for less variance.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.divergence import ratio, total

Correction = Callable[[Tensor, Hyperparameters], Tensor]
Level = Literal["token", "call", "rollout"]


def ratios(gap: Tensor, unit: Tensor | None = None, geometric: bool = False) -> Tensor:
    """Compute p_proximal / p_sampler of each token's unit from `gap`, the difference of each token's logprobs.

    `unit` numbers the call or the rollout of each token, all of whose tokens must be present; None: each token alone.
    With `geometric`, the ratio of a unit is the geometric mean over its tokens, which does not grow with their number.
    """
    if unit is None:
        return ratio(gap).detach()
    gap_U = total(gap, unit)
    if geometric:
        gap_U = gap_U / total(torch.ones_like(gap), unit).clamp(min=1)
    return ratio(gap_U[unit]).detach()
