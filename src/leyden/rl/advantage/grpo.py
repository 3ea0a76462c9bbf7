"""Group relative policy optimisation: the value minus its group's mean, in standard deviations of the group."""

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, standardised
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.registry import advantage


@advantage(
    credits=("identical", "discounted", "stepwise", "last_call"), reads=("deviation_floor",), compares_group=True
)
def grpo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = (V - mean) / max(deviation, floor), both of the group."""
    deviation = calls.deviation(calls.value, calls.group)
    return standardised(dr_grpo(calls, hyperparameters), deviation, hyperparameters.deviation_floor)
