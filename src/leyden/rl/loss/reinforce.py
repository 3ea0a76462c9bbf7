"""The policy gradient itself: for one update on what the policy has just sampled."""

from torch import Tensor

from leyden.rl.hyperparameters import Hyperparameters
from leyden.rl.loss import TokenBatch


def reinforce(tokens: TokenBatch, terms: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -A log p_current."""
    return -tokens.advantages * tokens.current, {}
