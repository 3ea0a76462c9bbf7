"""Identical assignment, as in the paper: every call has the return of its rollout."""

from leyden.config import Hyperparameters
from leyden.rl.credit import RolloutRewards
from leyden.rl.registry import credit


@credit()
def identical(rewards: RolloutRewards, hyperparameters: Hyperparameters) -> list[float]:
    """V_t = r_final + sum of all r_t."""
    return [rewards.total] * len(rewards.steps)
