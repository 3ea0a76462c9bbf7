"""The policy gradient itself: for one update on what the policy has just sampled."""

from torch import Tensor

from leyden.rl.loss import Tokens
from leyden.rl.terms import Terms


def reinforce(tokens: Tokens, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -A log p_current."""
    return -tokens.advantages * tokens.current, {}
