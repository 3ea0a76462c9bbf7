"""Losses of tokens.

A loss takes the logprobs of the policy as it is and as it was when the step began, and advantages, all of one shape; it
gives the loss of each token and figures worth reporting. `Clip` is how far the two policies may part.
"""

from collections.abc import Callable

from msgspec import Struct
from torch import Tensor


class Clip(Struct, frozen=True):
    """The ratio of the current to the proximal policy counts between 1 - low and 1 + high."""

    low: float
    high: float


Loss = Callable[[Tensor, Tensor, Tensor, Clip], tuple[Tensor, dict[str, Tensor]]]
"""(current, proximal, advantages, clip) -> (loss of each token, figures of each token)."""
