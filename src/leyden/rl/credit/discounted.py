"""Reward to go: the discounted sum of the rewards from a call on."""

from leyden.config import Hyperparameters
from leyden.rl.credit import RolloutRewards
from leyden.rl.registry import credit


@credit(reads=("gamma",), by_call=True)
def discounted(rewards: RolloutRewards, hyperparameters: Hyperparameters) -> list[float]:
    """V_t = r_t + gamma V_t+1, over all calls in time; the final reward comes with the last."""
    values: list[float] = []
    ahead = 0.0
    for reward in reversed(rewards.per_call):
        ahead = reward + hyperparameters.gamma * ahead
        values.append(ahead)
    return values[::-1]
