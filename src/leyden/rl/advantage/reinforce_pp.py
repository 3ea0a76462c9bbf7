"""REINFORCE++: a value normalised over the whole update, not its group; a group may have one rollout."""

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, standardised
from leyden.rl.registry import advantage


@advantage(credits=("identical", "discounted", "stepwise", "last_call"), reads=("deviation_floor", "normalize_by"))
def reinforce_pp(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = (V - mean) / max(deviation, floor), both of the calls of its kind."""
    above, deviation = calls.value - calls.mean(calls.value, calls.kind), calls.deviation(calls.value, calls.kind)
    return standardised(above, deviation, hyperparameters.deviation_floor)
