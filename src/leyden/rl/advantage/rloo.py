"""REINFORCE, leave one out: how far above the other rollouts of its group a value lies.

A baseline that the own rollout has no part in, so the gradient's expectation is exact.
"""

import numpy as np

from leyden.rl.advantage import CallBatch, Floats, over, total
from leyden.rl.hyperparameters import Hyperparameters


def rloo(calls: CallBatch, terms: Hyperparameters) -> Floats:
    """A = V - mean of the calls of the group's other rollouts."""

    def others(of: Floats) -> Floats:
        return total(of, calls.group) - total(of, calls.rollout)

    baseline = over(others(calls.weight * calls.value), others(calls.weight))
    return np.where(calls.comparable, calls.value - baseline, 0.0)
