"""Rewards stay with their calls: a call has its own reward and its part of the final one.

Rewards of calls that are not selected are dropped.
"""

from leyden.config import Hyperparameters
from leyden.rl.credit import RolloutRewards
from leyden.rl.registry import credit


@credit(reads=("spread",), by_call=True)
def stepwise(rewards: RolloutRewards, hyperparameters: Hyperparameters) -> list[float]:
    """V_t = r_t + r_final for all selected calls, or for the last alone, or r_final / (selected calls) for each."""
    calls = [call for call, selected in enumerate(rewards.selected) if selected]
    sharing = calls[-1:] if hyperparameters.spread == "last" else calls
    part = rewards.final / max(len(calls), 1) if hyperparameters.spread == "even" else rewards.final
    return [reward + (part if call in sharing else 0.0) for call, reward in enumerate(rewards.steps)]
