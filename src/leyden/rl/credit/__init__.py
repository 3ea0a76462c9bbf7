"""The rewards of one rollout, turned into a value for each of its calls.

A credit function takes `Earned` and gives one value a call, in the order of the calls; those of calls that are not
selected are not used, but such calls stay in time.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct


class Earned(Struct, frozen=True):
    """What a rollout earned: at each of its calls, and in the end."""

    steps: tuple[float, ...]
    """The weighted step and automatic rewards of each call."""
    final: float
    selected: tuple[bool, ...]
    """Which of the calls are trained on."""


Credit = Callable[[Earned], Sequence[float]]
