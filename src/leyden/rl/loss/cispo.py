"""Clipped importance sampling: no token is left out of the gradient, but none weighs more than the bound."""

from torch import Tensor

from leyden.rl.hyperparameters import Hyperparameters
from leyden.rl.loss import TokenBatch
from leyden.rl.ratio import ratio


def cispo(tokens: TokenBatch, terms: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(r, 1 + high) A log p_current, with no gradient through r = p_current / p_proximal."""
    r = ratio(tokens.current - tokens.proximal).detach()
    bound = 1 + terms.clip_high
    return -r.clamp(max=bound) * tokens.advantages * tokens.current, {"ratio": r, "clipped_high": r > bound}
