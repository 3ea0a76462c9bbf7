"""Reward to go: a call is worth what came with it and after it, what came later the less."""

from leyden.rl.credit import RolloutRewards
from leyden.rl.hyperparameters import Hyperparameters


def discounted(earned: RolloutRewards, terms: Hyperparameters) -> list[float]:
    """V_t = r_t + gamma V_t+1, over all calls in time; the final reward comes with the last."""
    values: list[float] = []
    ahead = 0.0
    for reward in reversed(earned.rewards):
        ahead = reward + terms.gamma * ahead
        values.append(ahead)
    return values[::-1]
