"""Group relative policy optimisation: the value minus its group's mean, in standard deviations of the group."""

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, over
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.registry import advantage


@advantage(credits=("identical", "discounted", "stepwise", "last_call"), compares_group=True)
def grpo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = (V - mean) / deviation, both of the group."""
    return over(dr_grpo(calls, hyperparameters), calls.deviation(calls.value, calls.group))
