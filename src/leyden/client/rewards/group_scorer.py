"""Scores whole groups, for reward functions that take `group`, after the last rollout of a group has ended.

Any worker of the run may do it. It leases the group, renews the lease while the function runs, and reports the rewards.
If the worker dies or stops, another one leases the group.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from leyden.api.client import RemoteError, RetryingRemote
from leyden.api.wire import GroupScoring, Scores, ScoringHeartbeat, ScoringRequest
from leyden.background import start_background
from leyden.client.rewards.function import NoReward, RewardFunction
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.outcomes import Ending

_log = logging.getLogger("leyden.worker")
_WAIT_S = 30.0
_GIVE_BACK_TIMEOUT_S = 5.0


class GroupScorer:
    """Leases and scores groups, several concurrently."""

    def __init__(
        self,
        client: RetryingRemote,
        reward: RewardFunction,
        services: ServiceRegistry,
        worker: str,
        run: str | None,
        concurrency: int,
    ) -> None:
        self._client, self._reward, self._services = client, reward, services
        self._request = ScoringRequest(worker, _WAIT_S, run)
        self._slots = asyncio.Semaphore(concurrency)

    async def work(self) -> None:
        """Score groups until cancelled; unfinished groups are given back."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._slots.acquire()
                leased: list[GroupScoring] = []
                try:
                    leased = await self._client.limited(timeout_s=_WAIT_S + 10).lease_scoring(self._request)
                finally:
                    if not leased:
                        self._slots.release()
                for scoring in leased:
                    tasks.create_task(self._score_leased(scoring))

    async def _score_leased(self, scoring: GroupScoring) -> None:
        try:
            async with self._kept_alive(scoring):
                scores = await self._score(scoring)
            await self._send(scoring, scores)
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GIVE_BACK_TIMEOUT_S):
                    await self._send(scoring, Scores(scoring.number, given_back=True))
            raise
        finally:
            self._slots.release()

    async def _score(self, scoring: GroupScoring) -> Scores:
        run, group = scoring.group.run, scoring.group.id
        try:
            found = await self._client.group_episodes(run, group)
            ended = [one for one in found if one.attempt.outcome and one.attempt.outcome.ending is Ending.SUCCEEDED]
            if not ended:  # the group was cancelled in the meantime
                return Scores(scoring.number)
            async with self._services.acquire(self._reward.services) as acquired:
                rewards = await self._reward.score_group(ended[0].task.input, ended, acquired)
        except RemoteError as refused:
            return Scores(scoring.number, message=f"the episodes of its group cannot be read: {refused}")
        except (NoReward, ServiceFailed) as error:
            return Scores(scoring.number, message=str(error))
        return Scores(scoring.number, dict(rewards), weights=self._reward.weights)

    async def _send(self, scoring: GroupScoring, scores: Scores) -> None:
        run, group = scoring.group.run, scoring.group.id
        try:
            await self._client.score_group(run, group, scores)
        except RemoteError as refused:
            if refused.status in (401, 403):
                raise  # the worker's key is invalid, so every request will fail
            _log.warning("the server refused the rewards of group %s: %s", group, refused)

    @asynccontextmanager
    async def _kept_alive(self, scoring: GroupScoring) -> AsyncIterator[None]:
        """Renew the lease every third of its length. If it is lost all the same, the server ignores the rewards."""
        run, group, interval = scoring.group.run, scoring.group.id, scoring.lease_s / 3
        client = self._client.limited(max(1.0, interval), max_backoff_s=interval)

        async def beat() -> None:
            while True:
                await asyncio.sleep(interval)
                with suppress(RemoteError):
                    await client.heartbeat_scoring(run, group, ScoringHeartbeat(scoring.number))

        beating = start_background(beat(), f"the heartbeat of scoring group {group}")
        try:
            yield
        finally:
            beating.cancel()
