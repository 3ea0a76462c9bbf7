"""Rewards where they happened: a call has its own, and its part of the final one.

What a call that is not selected earned goes to nobody.
"""

from leyden.rl.credit import RolloutRewards
from leyden.rl.hyperparameters import Hyperparameters


def stepwise(earned: RolloutRewards, terms: Hyperparameters) -> list[float]:
    """V_t = r_t + r_final for all selected calls, or for the last alone, or r_final / (selected calls) for each."""
    calls = [call for call, selected in enumerate(earned.selected) if selected]
    sharing = calls[-1:] if terms.spread == "last" else calls
    part = earned.final / max(len(calls), 1) if terms.spread == "even" else earned.final
    return [reward + (part if call in sharing else 0.0) for call, reward in enumerate(earned.steps)]
