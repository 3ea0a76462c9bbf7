"""The plain policy gradient, for one update on samples of the current policy."""

from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.loss import TokenBatch
from leyden.rl.registry import loss


@loss()
def reinforce(tokens: TokenBatch, hyperparameters: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -A log p_current."""
    return -tokens.advantages * tokens.current, {}
