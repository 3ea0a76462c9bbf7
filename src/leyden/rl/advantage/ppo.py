"""The advantage of proximal policy optimisation: the value minus the critic's, normalised over the update."""

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, over
from leyden.rl.registry import advantage


@advantage(credits=("gae",), reads=("normalize_by",), needs_critic=True)
def ppo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = (D - mean) / deviation, both of the update's part, D = V - the critic's value."""
    difference = calls.value - calls.baseline
    return over(difference - calls.mean(difference, calls.part), calls.deviation(difference, calls.part))
