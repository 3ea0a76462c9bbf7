"""Group sequence policy optimisation: the ratio is that of the whole call, which is clipped as one.

Every token has the loss of its call, so the sum over a call's n tokens is n times that, with the gradient of s A.
"""

import torch
from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.divergence import ratio, total
from leyden.rl.loss import TokenBatch
from leyden.rl.loss.ppo_clip import clipped
from leyden.rl.registry import loss


@loss(reads=("clip_low", "clip_high", "clip_dual"))
def gspo(tokens: TokenBatch, hyperparameters: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(s A, clip(s) A) with s = (p_current / p_proximal of the call)^(1 / its tokens)."""
    gap = tokens.current - tokens.proximal
    mean = total(gap, tokens.call) / total(torch.ones_like(gap), tokens.call)
    return clipped(ratio(mean)[tokens.call], tokens.advantages, hyperparameters)
