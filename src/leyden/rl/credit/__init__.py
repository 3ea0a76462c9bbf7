"""Credit functions turn the rewards of one rollout into a value for each of its calls.

A credit function takes `RolloutRewards` and `Hyperparameters` and returns one value per call, in order.
None means that the call is not trained on. The values of calls that are not selected are ignored, but such calls stay
in the sequence.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

from msgspec import Struct

from leyden.config import Hyperparameters


class RolloutRewards(Struct, frozen=True):
    """The rewards of a rollout: of each of its calls, and the final one."""

    steps: tuple[float, ...]
    """The weighted step and automatic rewards of each call."""
    final: float
    selected: tuple[bool, ...]
    """Which of the calls are trained on."""
    critic: tuple[float, ...] = ()
    """A critic's value of the state before each call; empty without a critic, ignored for unselected calls."""
    continued: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """For each point from which the rollout was continued: after how many calls, and the returns of continuations."""

    @property
    def total(self) -> float:
        """The return of the rollout: all its rewards."""
        return self.final + sum(self.steps)

    @property
    def per_call(self) -> tuple[float, ...]:
        """The rewards in time: the final reward comes with the last call."""
        return (*self.steps[:-1], self.steps[-1] + self.final) if self.steps else ()

    @property
    def known(self) -> tuple[float | None, ...]:
        """The value of the state before each call, as continuations from the last point before it estimate it."""
        means = [(calls, fmean(returns)) for calls, returns in self.continued]
        return tuple(
            next((mean for calls, mean in reversed(means) if calls <= call), None) for call in range(len(self.steps))
        )


Credit = Callable[[RolloutRewards, Hyperparameters], Sequence[float | None]]
