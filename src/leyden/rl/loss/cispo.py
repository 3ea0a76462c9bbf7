"""Clipped importance sampling: no token is left out of the gradient, but none weighs more than the bound."""

from torch import Tensor

from leyden.rl.loss import Tokens
from leyden.rl.ratio import ratio
from leyden.rl.terms import Terms


def cispo(tokens: Tokens, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(r, 1 + high) A log p_current, with no gradient through r = p_current / p_proximal."""
    r = ratio(tokens.current - tokens.proximal).detach()
    bound = 1 + terms.clip_high
    return -r.clamp(max=bound) * tokens.advantages * tokens.current, {"ratio": r, "clipped_high": r > bound}
