"""REINFORCE++ with a baseline: the value minus the group's mean, in standard deviations of the whole update.

No further mean is subtracted: the differences from whole groups have mean 0 in each, those by situation about 0.
"""

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, standardised
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.registry import advantage


@advantage(
    credits=("identical", "discounted", "stepwise", "last_call"),
    reads=("compare", "deviation_floor", "normalize_by"),
    compares_group=True,
)
def reinforce_pp_baseline(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = D / max(deviation of D over the calls of its kind, floor), D = V - the value to expect in the group."""
    difference = dr_grpo(calls, hyperparameters)
    return standardised(difference, calls.deviation(difference, calls.kind), hyperparameters.deviation_floor)
