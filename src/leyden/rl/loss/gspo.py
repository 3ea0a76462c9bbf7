"""Group sequence policy optimisation: the ratio is the whole call's, and a call is clipped or not as one.

Every token has its call's loss, so a sum over a call's n tokens is n times that, with the gradient of s A.
"""

import torch
from torch import Tensor

from leyden.rl.hyperparameters import Hyperparameters
from leyden.rl.loss import TokenBatch
from leyden.rl.loss.ppo_clip import clipped
from leyden.rl.ratio import ratio, total


def gspo(tokens: TokenBatch, terms: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(s A, clip(s) A) with s = (p_current / p_proximal of the call)^(1 / its tokens)."""
    gap = tokens.current - tokens.proximal
    mean = total(gap, tokens.call) / total(torch.ones_like(gap), tokens.call)
    return clipped(ratio(mean)[tokens.call], tokens.advantages, terms)
