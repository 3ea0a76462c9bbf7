"""Dr. GRPO: the value minus the mean of its group.

It does not divide by the deviation, which would give groups that are almost always right or wrong a large weight.
"""

import numpy as np

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats
from leyden.rl.registry import advantage


@advantage(credits=("identical", "discounted", "stepwise", "last_call"), compares_group=True)
def dr_grpo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = V - mean of the group."""
    return np.where(calls.comparable, calls.value - calls.mean(calls.value, calls.group), 0.0)
