"""The paper's assignment: every call has the return of its rollout."""

from leyden.rl.credit import RolloutRewards
from leyden.rl.hyperparameters import Hyperparameters


def identical(earned: RolloutRewards, terms: Hyperparameters) -> list[float]:
    """V_t = r_final + sum of all r_t."""
    return [earned.total] * len(earned.steps)
