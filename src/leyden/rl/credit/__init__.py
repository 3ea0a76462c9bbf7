"""The rewards of one rollout, turned into a value for each of its calls.

A credit function takes `Earned` and `Terms` and gives one value a call, in the order of the calls. None is no credit:
the call is not trained on. Values of calls that are not selected are not used, but such calls stay in time.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from leyden.rl.terms import Terms


class Earned(Struct, frozen=True):
    """What a rollout earned: at each of its calls, and in the end."""

    steps: tuple[float, ...]
    """The weighted step and automatic rewards of each call."""
    final: float
    selected: tuple[bool, ...]
    """Which of the calls are trained on."""
    critic: tuple[float, ...] = ()
    """What the state before each call is worth, by a critic; empty where there is none, unread where not selected."""

    @property
    def total(self) -> float:
        """The return of the rollout."""
        return self.final + sum(self.steps)

    @property
    def rewards(self) -> tuple[float, ...]:
        """In time: those on the way, and the final one with the last call."""
        return (*self.steps[:-1], self.steps[-1] + self.final) if self.steps else ()


Credit = Callable[[Earned, Terms], Sequence[float | None]]
