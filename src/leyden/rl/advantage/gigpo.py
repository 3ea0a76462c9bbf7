"""Group in group: rollouts of a task are compared by their returns, and calls in the same state by their values.

Two rollouts that came to the same state and went on differently say which way is better, at no cost of sampling.
"""

import numpy as np
from msgspec.structs import replace

from leyden.rl.advantage import CallBatch, Floats, over, weights
from leyden.rl.advantage.grpo import grpo
from leyden.rl.hyperparameters import Hyperparameters


def gigpo(calls: CallBatch, terms: Hyperparameters) -> Floats:
    """A = grpo of the returns, each rollout once + step_weight (V - mean) / deviation of the state, each call once."""
    episodes = replace(calls, value=calls.returns, weight=weights(calls.rollout, "rollout"))
    steps = replace(calls, weight=np.ones(len(calls.value)))
    above = steps.value - steps.mean(steps.value, steps.state)
    return grpo(episodes, terms) + terms.step_weight * over(above, steps.deviation(steps.value, steps.state))
