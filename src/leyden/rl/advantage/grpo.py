"""Group relative policy optimisation: how far above its group's mean a value lies, in deviations of the group."""

from leyden.rl.advantage import CallBatch, Floats, over
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.hyperparameters import Hyperparameters


def grpo(calls: CallBatch, terms: Hyperparameters) -> Floats:
    """A = (V - mean) / deviation, both of the group."""
    return over(dr_grpo(calls, terms), calls.deviation(calls.value, calls.group))
