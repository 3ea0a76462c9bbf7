"""Scoring whole groups: where the reward function takes `group`, somebody has to call it when the last rollout is done.

Any worker of the run may. It leases the group, keeps the lease alive while the function runs, and reports the scores; a
worker that dies or is stopped leaves the group to another.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from leyden.background import start_background
from leyden.client.retrying_client import RetryingClient
from leyden.client.rewards.function import NoReward, RewardFunction
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.outcomes import Ending
from leyden.remote import RemoteError
from leyden.wire import GroupScoring, Scores, ScoringRequest

_log = logging.getLogger("leyden.worker")
_WAIT_S = 30.0
_GIVE_BACK_S = 5.0


class GroupScorer:
    """Scores the groups that are ready, several at once."""

    def __init__(
        self,
        client: RetryingClient,
        reward: RewardFunction,
        services: ServiceRegistry,
        worker: str,
        run: str | None,
        at_once: int,
    ) -> None:
        self._client, self._reward, self._services = client, reward, services
        self._request = ScoringRequest(worker, _WAIT_S, run)
        self._places = asyncio.Semaphore(at_once)

    async def work(self) -> None:
        """Work until cancelled; what is not scored by then is given back."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._places.acquire()
                leased: list[GroupScoring] = []
                try:
                    leased = await self._client.retry(
                        lambda: self._client.remote.lease_scoring(self._request), timeout_s=_WAIT_S + 10
                    )
                finally:
                    if not leased:
                        self._places.release()
                for scoring in leased:
                    tasks.create_task(self._see_to(scoring))

    async def _see_to(self, scoring: GroupScoring) -> None:
        try:
            async with self._kept_alive(scoring):
                scores = await self._score(scoring)
            await self._send(scoring, scores)
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GIVE_BACK_S):
                    await self._send(scoring, Scores(scoring.number, given_back=True))
            raise
        finally:
            self._places.release()

    async def _score(self, scoring: GroupScoring) -> Scores:
        run, group = scoring.group.run, scoring.group.id
        try:
            found = await self._client.retry(lambda: self._client.remote.group_episodes(run, group))
            ended = [one for one in found if one.attempt.outcome and one.attempt.outcome.ending is Ending.SUCCEEDED]
            if not ended:  # the group was cancelled meanwhile
                return Scores(scoring.number)
            async with self._services.borrow(self._reward.services) as lent:
                rewards = await self._reward.score_group(ended[0].task.input, ended, lent)
        except RemoteError as refused:
            return Scores(scoring.number, message=f"the episodes of its group cannot be read: {refused}")
        except (NoReward, ServiceFailed) as error:
            return Scores(scoring.number, message=str(error))
        return Scores(scoring.number, dict(rewards))

    async def _send(self, scoring: GroupScoring, scores: Scores) -> None:
        run, group = scoring.group.run, scoring.group.id
        try:
            await self._client.retry(lambda: self._client.remote.score(run, group, scores))
        except RemoteError as refused:
            if refused.status in (401, 403):
                raise  # the worker's key is no good: nothing it does will be
            _log.warning("the scores of group %s are not wanted any more: %s", group, refused)

    @asynccontextmanager
    async def _kept_alive(self, scoring: GroupScoring) -> AsyncIterator[None]:
        """Prolong a lease at a third of its length. Where it was lost all the same, the scores come too late."""
        run, group, interval = scoring.group.run, scoring.group.id, scoring.lease_s / 3

        async def beat() -> None:
            while True:
                await asyncio.sleep(interval)
                with suppress(RemoteError):
                    await self._client.retry(
                        lambda: self._client.remote.heartbeat_scoring(run, group, scoring.number),
                        timeout_s=max(1.0, interval),
                        max_backoff_s=interval,
                    )

        beating = start_background(beat(), f"the heartbeat of scoring group {group}")
        try:
            yield
        finally:
            beating.cancel()
