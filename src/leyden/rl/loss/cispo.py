"""Clipped importance sampling (CISPO): every token has a gradient, and its weight is bounded."""

from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.divergence import ratio
from leyden.rl.loss import TokenBatch
from leyden.rl.registry import loss


@loss(reads=("clip_high",))
def cispo(tokens: TokenBatch, hyperparameters: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(r, 1 + high) A log p_current, with no gradient through r = p_current / p_proximal."""
    r = ratio(tokens.current - tokens.proximal).detach()
    bound = 1 + hyperparameters.clip_high
    return -r.clamp(max=bound) * tokens.advantages * tokens.current, {"ratio": r, "clipped_high": r > bound}
