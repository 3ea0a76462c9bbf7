"""Proximal policy optimisation's advantage: better than the critic had expected, over all of the update."""

from leyden.rl.advantage import CallBatch, Floats, over
from leyden.rl.hyperparameters import Hyperparameters


def ppo(calls: CallBatch, terms: Hyperparameters) -> Floats:
    """A = (D - mean) / deviation, both of the update's part, D = V - the critic's value."""
    surprise = calls.value - calls.baseline
    return over(surprise - calls.mean(surprise, calls.part), calls.deviation(surprise, calls.part))
