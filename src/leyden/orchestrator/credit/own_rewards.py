"""The rewards of an episode that count for one of several policies."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from leyden.episodes import Episode
from leyden.records import Reward, RewardKind


class ForeignRewards(Struct, frozen=True):
    """What counts for other policies alone."""

    names: frozenset[str] = frozenset()
    """Of final rewards."""
    policies: frozenset[str] = frozenset()
    """The other policies: step and automatic rewards of their calls are theirs."""

    def without(self, episode: Episode) -> Episode:
        """Return an episode with the rewards that are left; those of the attempt count for every policy."""
        if not self.names and not self.policies:
            return episode
        theirs = {call.id for call in episode.calls if call.policy in self.policies}

        def is_left(reward: Reward) -> bool:
            if reward.kind is RewardKind.FINAL:
                return reward.name not in self.names
            return episode.owner(reward) not in theirs

        return replace(episode, rewards=tuple(filter(is_left, episode.effective_rewards)))

    def final_rewards(self, episodes: Sequence[Episode], failure_reward: float) -> list[float]:
        """Return the final rewards that are left, of rollouts that do not begin inside another one."""
        whole = [self.without(episode) for episode in episodes if episode.rollout.origin is None]
        found = [episode.final_reward(failure_reward) for episode in whole]
        return [reward for reward in found if reward is not None]


NO_FOREIGN_REWARDS = ForeignRewards()
"""Of a run with one policy."""
