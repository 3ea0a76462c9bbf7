"""REINFORCE++ with a baseline: above the group's mean as in dr_grpo, in deviations of the whole update.

Those differences have the mean 0 in every group, so there is no further mean to take away.
"""

from leyden.rl.advantage import CallBatch, Floats, over
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.hyperparameters import Hyperparameters


def reinforce_pp_baseline(calls: CallBatch, terms: Hyperparameters) -> Floats:
    """A = D / (deviation of D in the update's part), D = V - mean of the group."""
    difference = dr_grpo(calls, terms)
    return over(difference, calls.deviation(difference, calls.part))
