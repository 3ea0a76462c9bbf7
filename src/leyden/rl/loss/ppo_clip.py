"""Proximal policy optimisation: no gain from moving a token's probability beyond the clip range."""

import torch
from torch import Tensor

from leyden.rl.hyperparameters import Hyperparameters
from leyden.rl.loss import TokenBatch
from leyden.rl.ratio import ratio


def ppo_clip(tokens: TokenBatch, terms: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(r A, clip(r, 1 - low, 1 + high) A) with r = p_current / p_proximal."""
    return clipped(ratio(tokens.current - tokens.proximal), tokens.advantages, terms)


def clipped(r: Tensor, advantages: Tensor, terms: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss of any ratio; where A < 0 and there is a dual clip, L is at most -dual A."""
    gain = torch.minimum(r * advantages, r.clamp(1 - terms.clip_low, 1 + terms.clip_high) * advantages)
    figures = {
        "ratio": r.detach(),
        "clipped_low": (r < 1 - terms.clip_low) & (advantages < 0),
        "clipped_high": (r > 1 + terms.clip_high) & (advantages > 0),
    }
    if terms.clip_dual is not None:
        figures["clipped_dual"] = (r > terms.clip_dual) & (advantages < 0)
        gain = torch.where(advantages < 0, torch.maximum(gain, terms.clip_dual * advantages), gain)
    return -gain, figures
