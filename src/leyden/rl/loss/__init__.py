"""Losses of tokens.

A loss takes `TokenBatch` and `Hyperparameters` and returns the loss of each token, and what to report of it: `ratio`
as the loss uses it, and `clipped_low`, `clipped_high`, `clipped_dual`, whether a bound clips the token. How the
losses of all tokens become one is the `aggregation`'s.
"""

from collections.abc import Callable

from msgspec import Struct
from torch import Tensor

from leyden.rl.hyperparameters import Hyperparameters


class TokenBatch(Struct, frozen=True):
    """Sampled tokens, flat, call after call; the calls are whole."""

    current: Tensor
    """Logprobs of the policy as it is, with gradient."""
    proximal: Tensor
    """Logprobs of the policy as it was when the step began."""
    advantages: Tensor
    """Of each token's call."""
    call: Tensor
    """Which call each token is of: 0, 1, 2, ..."""


Loss = Callable[[TokenBatch, Hyperparameters], tuple[Tensor, dict[str, Tensor]]]
