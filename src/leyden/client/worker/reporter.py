"""How an attempt ended, as the server is told: the outcome, the result, and the reward where there is one."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from leyden.client.host_protocol import AttemptEnd
from leyden.client.retrying_client import RetryingClient
from leyden.client.rewards.function import NoReward, RewardFunction
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Reward
from leyden.remote import RemoteError
from leyden.wire import FinishRequest, Lease

_log = logging.getLogger("leyden.worker")


class Reporter:
    """Scores what succeeded, and insists on being heard."""

    def __init__(self, contact: RetryingClient, reward: RewardFunction | None, services: ServiceRegistry) -> None:
        self._contact, self._reward, self._services = contact, reward, services

    def scores(self, ended: AttemptEnd | None) -> bool:
        """Whether an attempt that ended so is scored by the reward function before it is reported."""
        alone = self._reward is not None and not self._reward.takes_group
        return alone and ended is not None and ended.outcome.ending is Ending.SUCCEEDED

    def uses(self, service: str) -> bool:
        """Whether the reward function asks for a service."""
        return self._reward is not None and service in self._reward.services

    async def report(
        self, lease: Lease, ended: AttemptEnd, given: Sequence[Reward] = (), lent: Mapping[str, Any] = {}
    ) -> None:
        """Finish an attempt; returns when the server has acknowledged it, or knows of no such attempt.

        The rewards that it has `given` on its way go with its end: in one piece with what they belong to, and for
        nothing where the attempt is tried again. The reward function is given the services that the agent was `lent`.
        """
        finish = await self._finish(lease, ended, given, lent)
        whole = replace(finish, rewards=(*given, *finish.rewards), output=ended.output, retry=ended.retry)
        await self._send(lease, whole)

    async def give_back(self, lease: Lease) -> None:
        """Finish an attempt that this worker will not bring to its end, so that it is tried again at once."""
        message = f"worker {lease.attempt.worker} was stopped and gave it back"
        await self._send(lease, FinishRequest(Outcome(Ending.LOST, message), retry=Retry.FREE))

    async def _finish(
        self, lease: Lease, ended: AttemptEnd, given: Sequence[Reward], lent: Mapping[str, Any]
    ) -> FinishRequest:
        result = msgspec.json.decode(ended.result)
        if ended.outcome.ending is not Ending.SUCCEEDED:
            return FinishRequest(ended.outcome, result)
        value, source = ended.reward, "agent"
        if self._reward is not None and self._reward.takes_group:
            return FinishRequest(ended.outcome, result, awaits_group=True)
        if self._reward is not None:
            try:
                value, source = await self._score(self._reward, lease, result, ended.output, given, lent), "reward"
            except (NoReward, ServiceFailed) as error:
                return FinishRequest(Outcome(Ending.NO_REWARD, str(error)), result)
        return FinishRequest(ended.outcome, result, () if value is None else (Reward("final", value, source=source),))

    async def _score(
        self,
        reward: RewardFunction,
        lease: Lease,
        result: object,
        output: str,
        given: Sequence[Reward],
        lent: Mapping[str, Any],
    ) -> float:
        async def episode() -> Episode:
            attempt = lease.attempt
            try:
                found = await self._contact.insist(lambda: self._contact.remote.episode(attempt.run, attempt.id))
            except RemoteError as refused:
                raise NoReward(f"the reward function asks for an episode that cannot be read: {refused}") from refused
            return replace(found, rewards=(*found.rewards, *given), output=output)

        async with self._services.lend(name for name in reward.services if name not in lent) as more:
            return await reward.score(lease.task.input, result, episode, {**lent, **more})

    async def _send(self, lease: Lease, finish: FinishRequest) -> None:
        run, attempt = lease.attempt.run, lease.attempt.id
        try:
            finished = await self._contact.insist(lambda: self._contact.remote.finish(run, attempt, finish))
            self._contact.crowding = finished.crowding
        except RemoteError as refused:
            if refused.status in (401, 403):
                raise  # the worker's key is no good: nothing it does will be
            # a second source of the final reward, say, or no such call
            if finish.rewards or finish.result is not None or finish.awaits_group:
                failed = finish.outcome.ending is not Ending.SUCCEEDED
                outcome = finish.outcome if failed else Outcome(Ending.AGENT_ERROR, str(refused))
                await self._send(lease, FinishRequest(outcome, output=finish.output))
            elif refused.status == 404:
                _log.warning("attempt %s is not known any more: %s", attempt, refused)
            else:
                raise
