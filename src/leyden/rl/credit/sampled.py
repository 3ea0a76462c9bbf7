"""Credit by sampling: continuations from points inside a rollout estimate the values of the states there.

A call has the value of the state at the next point. `CallBatch.known` is the value of the state at the point before,
with which it is compared; calls before the first point are compared with those of their group. So the calls between
two points share the difference of their values, and those after the last have the return less the value there.
"""

from statistics import fmean

from leyden.config import Hyperparameters
from leyden.rl.credit import RolloutRewards
from leyden.rl.registry import credit


@credit(reads=("branch", "branch_tokens", "continuations"), advantages=("rloo", "dr_grpo", "grpo"))
def sampled(rewards: RolloutRewards, hyperparameters: Hyperparameters) -> list[float]:
    """V_t = mean return of the continuations from the next point and of the rollout itself."""
    following = [
        next((returns for calls, returns in rewards.continued if calls > call), ())
        for call in range(len(rewards.steps))
    ]
    return [fmean((rewards.total, *returns)) for returns in following]
