"""Group relative policy optimisation: the value minus its group's mean, in standard deviations of the group."""

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, standardised
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.registry import advantage


@advantage(
    credits=("identical", "discounted", "stepwise", "last_call"),
    reads=("compare", "deviation_floor"),
    compares_group=True,
)
def grpo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = D / max(deviation of D over the group, floor), D = V - the value to expect in the group."""
    difference = dr_grpo(calls, hyperparameters)
    return standardised(difference, calls.deviation(difference, calls.group), hyperparameters.deviation_floor)
