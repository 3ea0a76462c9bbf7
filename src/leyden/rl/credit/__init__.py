"""The rewards of one rollout, turned into a value for each of its calls.

A credit function takes `RolloutRewards` and `Hyperparameters` and returns one value per call, in order.
None means that the call is not trained on. The values of calls that are not selected are ignored, but such calls keep
their place in the sequence.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from leyden.rl.hyperparameters import Hyperparameters


class RolloutRewards(Struct, frozen=True):
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


Credit = Callable[[RolloutRewards, Hyperparameters], Sequence[float | None]]
