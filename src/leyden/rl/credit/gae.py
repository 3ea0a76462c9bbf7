"""Lambda-returns: what followed a call, part as it was rewarded and part as a critic saw it coming.

The decision process is that of the selected calls, since only before those does the critic see a state. What other
calls earned accrues to the last selected call before them, discounted by their distance in calls; what was earned
before the first selected call no decision could change, and it counts for none. So `lam = 1` is `discounted`, and less
changes what is believed, never when things happened. G_t less the critic's value is the generalised advantage estimate.
"""

from leyden.rl.credit import RolloutRewards
from leyden.rl.hyperparameters import Hyperparameters


def gae(earned: RolloutRewards, terms: Hyperparameters) -> list[float | None]:
    """G_t = r_t + gamma ((1 - lam) V_t+1 + lam G_t+1); where t+1 is not selected it is passed through, lam as 1."""
    if len(earned.critic) != len(earned.steps):
        raise ValueError(f"gae takes a critic's value for each of {len(earned.steps)} calls, got {len(earned.critic)}")
    values: list[float | None] = []
    ahead = 0.0
    for reward, selected, critic in reversed(list(zip(earned.rewards, earned.selected, earned.critic, strict=True))):
        value = reward + terms.gamma * ahead
        ahead = (1 - terms.lam) * critic + terms.lam * value if selected else value
        values.append(value if selected else None)
    return values[::-1]
