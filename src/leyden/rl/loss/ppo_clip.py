"""Proximal policy optimisation: moving a token's probability beyond the clip range gains nothing."""

import torch
from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.divergence import ratio
from leyden.rl.loss import TokenBatch
from leyden.rl.registry import loss


@loss(reads=("clip_low", "clip_high", "clip_dual"))
def ppo_clip(tokens: TokenBatch, hyperparameters: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(r A, clip(r, 1 - low, 1 + high) A) with r = p_current / p_proximal."""
    return clipped(ratio(tokens.current - tokens.proximal), tokens.advantages, hyperparameters)


def clipped(r: Tensor, advantages: Tensor, hyperparameters: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped loss of any ratio; if A < 0 and there is a dual clip, L is at most -dual A."""
    low, high, dual = 1 - hyperparameters.clip_low, 1 + hyperparameters.clip_high, hyperparameters.clip_dual
    gain = torch.minimum(r * advantages, r.clamp(low, high) * advantages)
    metrics = {
        "ratio": r.detach(),
        "clipped_low": (r < low) & (advantages < 0),
        "clipped_high": (r > high) & (advantages > 0),
    }
    if dual is not None:
        metrics["clipped_dual"] = (r > dual) & (advantages < 0)
        gain = torch.where(advantages < 0, torch.maximum(gain, dual * advantages), gain)
    return -gain, metrics
