"""Loss functions compute a loss for each token.

A loss takes `TokenBatch` and `Hyperparameters` and returns the loss of each token and metrics of each token: `ratio` as
the loss uses it, and `clipped_low`, `clipped_high`, `clipped_dual`, whether a bound clips the token. The `aggregation`
combines the losses of all tokens.
"""

from collections.abc import Callable

from msgspec import Struct
from torch import Tensor

from leyden.config import Hyperparameters


class TokenBatch(Struct, frozen=True):
    """Sampled tokens, flat, call after call; calls are never split."""

    current: Tensor
    """Logprobs under the current policy, with gradient."""
    proximal: Tensor
    """Logprobs under the policy at the start of the step."""
    advantages: Tensor
    """Of each token's call."""
    call: Tensor
    """The call of each token: 0, 1, 2, ..."""


Loss = Callable[[TokenBatch, Hyperparameters], tuple[Tensor, dict[str, Tensor]]]
