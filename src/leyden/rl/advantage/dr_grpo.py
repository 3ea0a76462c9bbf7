"""Dr. GRPO: the value minus the mean of its group, in the same situation if situations are compared.

It does not divide by the deviation, which would give groups that are almost always right or wrong a large weight.
"""

import numpy as np

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats
from leyden.rl.registry import advantage


@advantage(credits=("identical", "discounted", "stepwise", "last_call"), reads=("compare",), compares_group=True)
def dr_grpo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = V - the value to expect in the group."""
    return np.where(calls.comparable, calls.above(calls.group), 0.0)
