"""Reports to the server how attempts ended: the outcome, the result and the final reward.

The final reward comes from one of three sources: the agent's return value, which `attempt.outcome` reads; the run's
reward function; or, if that function takes `group`, later the `GroupScorer`.
"""

import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from leyden.api.client import RemoteError, RetryingRemote
from leyden.api.wire import FinishRequest, Lease
from leyden.client.rewards.function import NoReward, RewardFunction
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import FINAL_REWARD_ID, GivenReward, Reward, final_rewards

_log = logging.getLogger("leyden.worker")


class Reporter:
    """Scores attempts that succeeded and reports every attempt until the server acknowledges it."""

    def __init__(
        self,
        client: RetryingRemote,
        reward: RewardFunction | None,
        services: ServiceRegistry,
        on_end: Callable[[FinishRequest], None] = lambda _: None,
    ) -> None:
        """`on_end` is called for each attempt whose end the server has acknowledged."""
        self._client, self._services, self._on_end = client, services, on_end
        self._scored_as_group = reward is not None and reward.takes_group
        """Whether final rewards come when a whole group has ended, and not from here."""
        self._reward = None if self._scored_as_group else reward
        self.queue_pressure: float | None = None
        """Model calls that wait for the engine per call that it serves, as the server last reported it."""

    def needs_scoring(self, end: FinishRequest | None) -> bool:
        """Whether the reward function runs before this end is reported."""
        return self._reward is not None and end is not None and end.outcome.ending is Ending.SUCCEEDED

    def reward_uses(self, service: str) -> bool:
        """Whether the reward function uses a service."""
        return self._reward is not None and service in self._reward.services

    async def report(self, lease: Lease, end: FinishRequest, step_rewards: Sequence[Reward] = ()) -> None:
        """Score an attempt and report its end; returns when the server has acknowledged it or does not know it.

        Step rewards are sent together with the end: they count only if this attempt does. The reward function receives
        the services that the agent had.
        """
        scored = await self._score(lease, end, step_rewards)
        await self._send(lease, replace(scored, rewards=(*step_rewards, *scored.rewards)))

    async def give_back(self, lease: Lease) -> None:
        """Report an attempt that this worker will not finish, so that it is retried at once and for free."""
        message = f"worker {lease.attempt.worker} was stopped and gave it back"
        await self._send(lease, FinishRequest(Outcome(Ending.LOST, message), retry=Retry.FREE))

    async def _score(self, lease: Lease, end: FinishRequest, step_rewards: Sequence[Reward]) -> FinishRequest:
        """Determine outcome and final reward; the reward function is called here."""
        if end.outcome.ending is not Ending.SUCCEEDED:
            return replace(end, rewards=())
        if self._scored_as_group:
            return replace(end, rewards=(), awaits_group=True)
        if self._reward is None:
            return end
        try:
            given = await self._call(self._reward, lease, end, step_rewards)
        except (NoReward, ServiceFailed) as error:
            return replace(end, outcome=Outcome(Ending.NO_REWARD, str(error)), rewards=())
        return replace(end, rewards=tuple(final_rewards(FINAL_REWARD_ID, given, "reward", self._reward.weights)))

    async def _call(
        self, reward: RewardFunction, lease: Lease, end: FinishRequest, step_rewards: Sequence[Reward]
    ) -> GivenReward:
        """Return the final reward of an attempt that succeeded. Raises `NoReward` or `ServiceFailed`.

        The function receives the services that the agent had, and acquires the others. The episode, if it
        takes one, is read from the server; output and step rewards, which the server does not have yet, are added.
        """

        async def read_episode() -> Episode:
            try:
                episode = await self._client.get_episode(lease.run, lease.id)
            except RemoteError as refused:
                raise NoReward(
                    f"the episode that the reward function takes cannot be read from the server: {refused}"
                ) from refused
            return replace(episode, rewards=(*episode.rewards, *step_rewards), output=end.output)

        missing = [name for name in reward.services if name not in lease.services]
        async with self._services.acquire(missing) as more:
            return await reward.score(lease.task.input, end.result, read_episode, {**lease.services, **more})

    async def _send(self, lease: Lease, request: FinishRequest) -> None:
        try:
            reply = await self._client.finish(lease.run, lease.id, request)
            self.queue_pressure = reply.queue_pressure
            self._on_end(request)
        except RemoteError as refused:
            if refused.status in (401, 403):
                raise  # the worker's key is invalid, so nothing else would succeed either
            # the server refuses what comes with the end, a second final reward for example: report the end alone
            if request.rewards or request.result is not None or request.awaits_group:
                failed = request.outcome.ending is not Ending.SUCCEEDED
                outcome = request.outcome if failed else Outcome(Ending.AGENT_ERROR, str(refused))
                await self._send(lease, FinishRequest(outcome, output=request.output, retry=request.retry))
            elif refused.status == 404:
                _log.warning("the server no longer knows attempt %s: %s", lease.id, refused)
            else:
                raise
