"""What a token counts that another policy drew: an engine computes differently, and its weights may be older.

A correction takes the ratio of the proximal policy to the sampler for each token, taken at a level, and gives the
weight of the token's loss; no gradient goes through it. Unbounded and at the level of rollouts, it makes up for the
difference exactly, on average; bounds and lower levels trade that for less variance.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from leyden.rl.hyperparameters import Hyperparameters
from leyden.rl.ratio import ratio, total

Correction = Callable[[Tensor, Hyperparameters], Tensor]
Level = Literal["token", "call", "rollout"]


def ratios(gap: Tensor, unit: Tensor | None = None) -> Tensor:
    """p_proximal / p_sampler of each token's unit, of `gap`, the difference of each token's logprobs.

    `unit` numbers the call or the rollout of each token, all of whose tokens must be there; None: each token is one.
    """
    return ratio(gap if unit is None else total(gap, unit)[unit]).detach()
