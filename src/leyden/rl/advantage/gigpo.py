"""Group-in-group policy optimisation: compares rollouts of a task by return, and calls in the same state by value.

Rollouts that reach the same state and continue differently show which continuation is better, without more sampling.
"""

import numpy as np
from msgspec.structs import replace

from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats, standardised, weights
from leyden.rl.advantage.grpo import grpo
from leyden.rl.registry import advantage


@advantage(credits=("discounted", "stepwise"), reads=("deviation_floor", "state", "step_weight"))
def gigpo(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """A = grpo of the returns, each rollout once + step_weight (V - mean) / deviation of the state, each call once."""
    episodes = replace(calls, value=calls.returns, weight=weights(calls.rollout, "rollout"))
    steps = replace(calls, weight=np.ones(len(calls.value)))
    above = steps.value - steps.mean(steps.value, steps.state)
    deviation = steps.deviation(steps.value, steps.state)
    step_level = standardised(above, deviation, hyperparameters.deviation_floor)
    return grpo(episodes, hyperparameters) + hyperparameters.step_weight * step_level
