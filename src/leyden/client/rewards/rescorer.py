"""Runs a reward function on the finished rollouts of a run again.

New rewards are added and the old ones are kept. Only ended rollouts are scored, so the run may be training meanwhile.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from typing import Protocol

from msgspec import Struct

from leyden.api.wire import Recorded, RolloutPage
from leyden.client.rewards.function import NoReward, RewardFunction, Unrewarded
from leyden.client.services.registry import ServiceRegistry
from leyden.episodes import Episode
from leyden.outcomes import Ending
from leyden.records import GivenReward, Purpose, Reward, Rollout, State, final_rewards

_PAGE = 500
_MAX_SOURCE_LENGTH = 160


class EpisodeSource(Protocol):
    """Recorded rollouts to which rewards can be added."""

    async def list_rollouts(self, run: str, page: RolloutPage, /) -> Sequence[Rollout]:
        """List rollouts in the order in which they were queued."""

    async def get_episode(self, run: str, attempt: str, /) -> Episode:
        """Return everything recorded for an attempt."""

    async def record_rewards(self, run: str, attempt: str, rewards: Sequence[Reward]) -> Recorded:
        """Add rewards to an attempt that has ended."""


class RescoredRollout(Struct, frozen=True):
    """The final reward of a rollout before and after, None if it has none, and the error if scoring failed."""

    rollout: str
    purpose: Purpose
    before: float | None
    after: float | None
    error: str = ""
    unrewarded: bool = False
    """The function returned no reward, so the rollout keeps its old one."""


class Rescorer:
    """Scores the rollouts of a run again. If `dry`, nothing is written."""

    def __init__(
        self,
        episodes: EpisodeSource,
        run: str,
        reward: RewardFunction,
        reference: str,
        services: ServiceRegistry,
        dry: bool,
    ) -> None:
        self._episodes, self._run, self._reward, self._services, self._dry = episodes, run, reward, services, dry
        self.source = f"rescore {re.sub(r'[^A-Za-z0-9 ._:@~/+-]', '-', reference)}"[:_MAX_SOURCE_LENGTH]
        """The `source` of the rewards that it adds."""
        self._name = f"rescore-{secrets.token_hex(6)}"

    async def rescore(self, concurrency: int) -> AsyncIterator[RescoredRollout]:
        """Score up to `concurrency` groups concurrently and yield each rollout when it is done."""
        tasks: set[asyncio.Task[list[RescoredRollout]]] = set()
        try:
            async for group in self._groups():
                tasks.add(asyncio.create_task(self._rescore_group(group)))
                if len(tasks) >= concurrency:
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        for one in task.result():
                            yield one
            for finished in asyncio.as_completed(tasks):
                for one in await finished:
                    yield one
        finally:
            for task in tasks:
                task.cancel()

    async def _groups(self) -> AsyncIterator[list[Rollout]]:
        """Yield the rollouts of each group, which are listed consecutively."""
        rest: list[Rollout] = []
        while page := await self._episodes.list_rollouts(self._run, RolloutPage(rest[-1].id if rest else "", _PAGE)):
            *whole, rest = (list(group) for _, group in groupby([*rest, *page], lambda rollout: rollout.group))
            for group in whole:
                yield group
        if rest:
            yield rest

    async def _rescore_group(self, group: Sequence[Rollout]) -> list[RescoredRollout]:
        scorable = [r for r in group if r.outcome and r.outcome.ending in (Ending.SUCCEEDED, Ending.NO_REWARD)]
        found = [await self._episodes.get_episode(self._run, f"{r.id}.{r.attempts}") for r in scorable]
        episodes = [one for one in found if not _awaits_group_scoring(one)]
        if not self._reward.takes_group:
            return [await self._rescore_one(episode) for episode in episodes]
        if not episodes or any(rollout.state is not State.FINISHED for rollout in group):
            return []
        try:
            async with self._services.acquire(self._reward.services) as acquired:
                rewards = await self._reward.score_group(episodes[0].task.input, episodes, acquired)
        except NoReward as error:
            return [_failed(episode, str(error)) for episode in episodes]
        return [await self._record(episode, rewards[episode.rollout.id]) for episode in episodes]

    async def _rescore_one(self, episode: Episode) -> RescoredRollout:
        async def read_episode() -> Episode:
            return episode

        try:
            async with self._services.acquire(self._reward.services) as acquired:
                value = await self._reward.score(episode.task.input, episode.attempt.result, read_episode, acquired)
        except Unrewarded:
            return _unrewarded(episode)
        except NoReward as error:
            return _failed(episode, str(error))
        return await self._record(episode, value)

    async def _record(self, episode: Episode, given: GivenReward | None) -> RescoredRollout:
        if given is None:
            return _unrewarded(episode)
        rewards = final_rewards(self._name, given, self.source, self._reward.weights)
        if not self._dry:
            await self._episodes.record_rewards(self._run, episode.attempt.id, rewards)
        after = sum(reward.weight * reward.value for reward in rewards)
        return RescoredRollout(episode.rollout.id, episode.rollout.purpose, _final(episode), after)


def _final(episode: Episode) -> float | None:
    return episode.final_reward(0.0)  # rescored rollouts never have the failure reward


def _failed(episode: Episode, why: str) -> RescoredRollout:
    before = _final(episode)
    return RescoredRollout(episode.rollout.id, episode.rollout.purpose, before, before, why)


def _unrewarded(episode: Episode) -> RescoredRollout:
    before = _final(episode)
    return RescoredRollout(episode.rollout.id, episode.rollout.purpose, before, before, unrewarded=True)


def _awaits_group_scoring(episode: Episode) -> bool:
    """Whether its group has not been scored by the run's own reward function yet."""
    outcome = episode.attempt.outcome
    return outcome is not None and outcome.ending is Ending.SUCCEEDED and _final(episode) is None
