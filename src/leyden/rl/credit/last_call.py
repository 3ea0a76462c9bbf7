"""Only the last call that is trained on has credit: the return. The others are its context."""

from leyden.rl.credit import RolloutRewards
from leyden.rl.hyperparameters import Hyperparameters


def last_call(earned: RolloutRewards, terms: Hyperparameters) -> list[float | None]:
    """V of the last selected call = r_final + sum of all r_t."""
    last = max((call for call, selected in enumerate(earned.selected) if selected), default=None)
    return [earned.total if call == last else None for call in range(len(earned.steps))]
