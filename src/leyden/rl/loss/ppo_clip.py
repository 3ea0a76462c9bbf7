"""Proximal policy optimisation: no gain from moving a token's probability beyond the clip range."""

import torch
from torch import Tensor

from leyden.rl.loss import Clip


def ppo_clip(current: Tensor, proximal: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(r A, clip(r, 1 - low, 1 + high) A) with r = p_current / p_proximal."""
    ratio = torch.exp(current - proximal)
    free = ratio * advantages
    held = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    return -torch.minimum(free, held), {"clipped": (held < free).to(ratio.dtype), "ratio": ratio.detach()}
