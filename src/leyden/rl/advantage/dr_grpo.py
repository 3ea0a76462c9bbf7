"""GRPO done right: how far above its group's mean a value lies.

Without the deviation, which makes much of groups that are almost always right or wrong.
"""

import numpy as np

from leyden.rl.advantage import CallBatch, Floats
from leyden.rl.hyperparameters import Hyperparameters


def dr_grpo(calls: CallBatch, terms: Hyperparameters) -> Floats:
    """A = V - mean of the group."""
    return np.where(calls.comparable, calls.value - calls.mean(calls.value, calls.group), 0.0)
