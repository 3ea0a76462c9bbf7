"""Lambda-returns, for generalised advantage estimation: a mix of the rewards that followed and a critic's values.

Only selected calls are decisions, because the critic sees a state only before those. Rewards of other calls go to the
last selected call before them, discounted by the distance in calls; rewards before the first selected call count for
none. `lam = 1` equals `discounted`. G_t minus the critic's value is the generalised advantage estimate.
"""

from leyden.config import Hyperparameters
from leyden.rl.credit import RolloutRewards
from leyden.rl.registry import credit


@credit(reads=("gamma", "lam"), by_call=True, needs_critic=True)
def gae(rewards: RolloutRewards, hyperparameters: Hyperparameters) -> list[float | None]:
    """G_t = r_t + gamma ((1 - lam) V_t+1 + lam G_t+1); if t+1 is not selected, lam is 1."""
    if len(rewards.critic) != len(rewards.steps):
        raise ValueError(
            f"gae needs a critic's value for each of {len(rewards.steps)} calls, got {len(rewards.critic)}"
        )
    values: list[float | None] = []
    ahead = 0.0
    calls = list(zip(rewards.per_call, rewards.selected, rewards.critic, strict=True))
    for reward, selected, critic in reversed(calls):
        value = reward + hyperparameters.gamma * ahead
        ahead = (1 - hyperparameters.lam) * critic + hyperparameters.lam * value if selected else value
        values.append(value if selected else None)
    return values[::-1]
