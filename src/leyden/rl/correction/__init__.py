"""Corrections weigh tokens that another policy sampled: the engine computes differently, or has older weights.

A correction takes the ratio of the proximal policy to the sampler for each token, at a level (token, call or rollout),
and returns the weight of the token's loss; no gradient flows through it. Unbounded and at the rollout level it is
unbiased; bounds and lower levels trade bias for less variance.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.ratio import ratio, total

Correction = Callable[[Tensor, Hyperparameters], Tensor]
Level = Literal["token", "call", "rollout"]


def ratios(gap: Tensor, unit: Tensor | None = None) -> Tensor:
    """Compute p_proximal / p_sampler of each token's unit from `gap`, the difference of each token's logprobs.

    `unit` numbers the call or the rollout of each token, all of whose tokens must be present; None: each token alone.
    """
    return ratio(gap if unit is None else total(gap, unit)[unit]).detach()
