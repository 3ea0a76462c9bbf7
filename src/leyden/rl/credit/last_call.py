"""The last call that is trained on has the return as its value; the others are not trained on."""

from leyden.config import Hyperparameters
from leyden.rl.credit import RolloutRewards
from leyden.rl.registry import credit


@credit()
def last_call(rewards: RolloutRewards, hyperparameters: Hyperparameters) -> list[float | None]:
    """V of the last selected call = r_final + sum of all r_t."""
    last = max((call for call, selected in enumerate(rewards.selected) if selected), default=None)
    return [rewards.total if call == last else None for call in range(len(rewards.steps))]
