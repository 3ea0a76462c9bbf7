"""Computes automatic rewards of the episodes of a step and records them on the server."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from leyden.api.client import Remote
from leyden.episodes import Episode
from leyden.records import Reward, RewardKind
from leyden.rl.signals import SignalRules, automatic
from leyden.user_code.bridge import call_in_thread


async def reward_automatically(
    remote: Remote, episodes: Sequence[Episode], rules: SignalRules, step: int
) -> list[Episode]:
    """Return the episodes with this step's automatic rewards, recorded; they replace those of an earlier start."""
    if not rules.enabled:
        return list(episodes)
    given = await call_in_thread(lambda: [automatic(episode, rules, step) for episode in episodes])
    await asyncio.gather(
        *(
            remote.record_rewards(episode.attempt.run, episode.attempt.id, rewards)
            for episode, rewards in zip(episodes, given, strict=True)
            if rewards
        )
    )
    return [
        replace(episode, rewards=(*_others(episode), *rewards))
        for episode, rewards in zip(episodes, given, strict=True)
    ]


def _others(episode: Episode) -> list[Reward]:
    return [reward for reward in episode.rewards if reward.kind is not RewardKind.AUTOMATIC]
