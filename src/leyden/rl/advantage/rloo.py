"""REINFORCE leave-one-out: the value minus the mean of the other rollouts of its group.

The baseline does not depend on the rollout itself, so the gradient is unbiased.
"""

import numpy as np

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats
from leyden.rl.registry import advantage


@advantage(credits=("identical", "discounted", "stepwise", "last_call"), reads=("compare",), compares_group=True)
def rloo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = V - the value to expect from the group's other rollouts."""
    return np.where(calls.alone, 0.0, calls.above(calls.group, leave_out=True))
