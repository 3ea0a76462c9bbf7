"""Credit functions turn the rewards of one rollout into a value for each of its calls.

A credit function takes `RolloutRewards` and `Hyperparameters` and returns one value per call, in order.
None means that the call is not trained on. The values of calls that are not selected are ignored, but such calls stay
in the sequence.
"""

from collections.abc import Callable, Sequence

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

    @property
    def total(self) -> float:
        """The return of the rollout: all its rewards."""
        return self.final + sum(self.steps)

    @property
    def per_call(self) -> tuple[float, ...]:
        """The rewards in time: the final reward comes with the last call."""
        return (*self.steps[:-1], self.steps[-1] + self.final) if self.steps else ()


Credit = Callable[[RolloutRewards, Hyperparameters], Sequence[float | None]]
