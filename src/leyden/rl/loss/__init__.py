"""Losses of tokens.

A loss takes `Tokens` and `Terms` and gives the loss of each token, and figures of each token worth reporting: `ratio`
as the loss uses it, and `clipped_low`, `clipped_high`, `clipped_dual`: whether a bound holds the token back. How losses
become one is said by `aggregation`.
"""

from collections.abc import Callable

from msgspec import Struct
from torch import Tensor

from leyden.rl.terms import Terms


class Tokens(Struct, frozen=True):
    """Sampled tokens, flat, call after call; the calls are whole."""

    current: Tensor
    """Logprobs of the policy as it is, with gradient."""
    proximal: Tensor
    """Logprobs of the policy as it was when the step began."""
    advantages: Tensor
    """Of each token's call."""
    call: Tensor
    """Which call each token is of: 0, 1, 2, ..."""


Loss = Callable[[Tokens, Terms], tuple[Tensor, dict[str, Tensor]]]
