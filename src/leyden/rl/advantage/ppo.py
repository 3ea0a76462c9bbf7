"""The advantage of proximal policy optimisation: the value minus the critic's, normalised over the update."""

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, standardised
from leyden.rl.registry import advantage


@advantage(credits=("gae",), reads=("deviation_floor", "normalize_by"), needs_critic=True)
def ppo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = (D - mean) / max(deviation, floor), both of the calls of its kind, D = V - the critic's value."""
    difference = calls.value - calls.baseline
    above, deviation = difference - calls.mean(difference, calls.kind), calls.deviation(difference, calls.kind)
    return standardised(above, deviation, hyperparameters.deviation_floor)
