"""REINFORCE leave-one-out: the value minus the mean of the other rollouts of its group.

The baseline does not depend on the rollout itself, so the gradient is unbiased.
"""

import numpy as np

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, over, total
from leyden.rl.registry import advantage


@advantage(credits=("identical", "discounted", "stepwise", "last_call"), compares_group=True)
def rloo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = V - mean of the calls of the group's other rollouts."""

    def others(of: Floats) -> Floats:
        return total(of, calls.group) - total(of, calls.rollout)

    baseline = over(others(calls.weight * calls.value), others(calls.weight))
    return np.where(calls.comparable, calls.value - baseline, 0.0)
