"""REINFORCE++: a value normalised over the whole update, not its group; a group may have one rollout."""

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, standardised
from leyden.rl.registry import advantage


@advantage(
    credits=("identical", "discounted", "stepwise", "last_call"), reads=("compare", "deviation_floor", "normalize_by")
)
def reinforce_pp(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = D / max(deviation of D, floor) over the calls of its kind, D = V - the value to expect of that kind."""
    difference = calls.above(calls.kind)
    return standardised(difference, calls.deviation(difference, calls.kind), hyperparameters.deviation_floor)
