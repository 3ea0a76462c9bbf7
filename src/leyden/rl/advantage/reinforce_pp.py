"""REINFORCE++: a value against all of the update's, whatever their group; a group may be of one."""

from leyden.rl.advantage import CallBatch, Floats, over
from leyden.rl.hyperparameters import Hyperparameters


def reinforce_pp(calls: CallBatch, terms: Hyperparameters) -> Floats:
    """A = (V - mean) / deviation, both of the update's part."""
    return over(calls.value - calls.mean(calls.value, calls.part), calls.deviation(calls.value, calls.part))
