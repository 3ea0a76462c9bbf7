"""Reports to the server how attempts ended: the outcome, the result and the final reward.

The final reward comes from one of three sources: the agent's return value (`AttemptEnd.reward`), the run's reward
function, or, if that function takes `group`, later from the `GroupScorer`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from leyden.api.client import RemoteError, RetryingRemote
from leyden.api.wire import FinishRequest, Lease
from leyden.client.host_protocol import AttemptEnd
from leyden.client.rewards.function import NoReward, RewardFunction
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.decoding import decode_json
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
        weights: Mapping[str, float] = {},
    ) -> None:
        """`on_end` is called for each attempt whose end the server has acknowledged; `weights` are those of parts."""
        self._client, self._services, self._on_end, self._weights = client, services, on_end, weights
        self._scored_as_group = reward is not None and reward.takes_group
        """Whether final rewards come when a whole group has ended, and not from here."""
        self._reward = None if self._scored_as_group else reward
        self.queue_pressure: float | None = None
        """Model calls that wait for the engine per call that it serves, as the server last reported it."""

    def needs_scoring(self, end: AttemptEnd | None) -> bool:
        """Whether the reward function runs before this end is reported."""
        return self._reward is not None and end is not None and end.outcome.ending is Ending.SUCCEEDED

    def reward_uses(self, service: str) -> bool:
        """Whether the reward function uses a service."""
        return self._reward is not None and service in self._reward.services

    async def report(
        self,
        lease: Lease,
        end: AttemptEnd,
        step_rewards: Sequence[Reward] = (),
        acquired: Mapping[str, Any] = {},
    ) -> None:
        """Score an attempt and report its end; returns when the server has acknowledged it or does not know it.

        Step rewards are sent together with the end: they count only if this attempt does. The reward function receives
        the services that the agent had `acquired`.
        """
        request = await self._score(lease, end, step_rewards, acquired)
        rewards = (*step_rewards, *request.rewards)
        await self._send(lease, replace(request, rewards=rewards, output=end.output, retry=end.retry))

    async def give_back(self, lease: Lease) -> None:
        """Report an attempt that this worker will not finish, so that it is retried at once and for free."""
        message = f"worker {lease.attempt.worker} was stopped and gave it back"
        await self._send(lease, FinishRequest(Outcome(Ending.LOST, message), retry=Retry.FREE))

    async def _score(
        self, lease: Lease, end: AttemptEnd, step_rewards: Sequence[Reward], acquired: Mapping[str, Any]
    ) -> FinishRequest:
        """Determine outcome and final reward; the reward function is called here."""
        result = decode_json(bytes(end.result))
        if end.outcome.ending is not Ending.SUCCEEDED:
            return FinishRequest(end.outcome, result)
        if self._scored_as_group:
            return FinishRequest(end.outcome, result, awaits_group=True)
        given, source = end.reward, "agent"
        if self._reward is not None:
            try:
                given = await self._call(self._reward, lease, result, end.output, step_rewards, acquired)
            except (NoReward, ServiceFailed) as error:
                return FinishRequest(Outcome(Ending.NO_REWARD, str(error)), result)
            source = "reward"
        final = [] if given is None else final_rewards(FINAL_REWARD_ID, given, source, self._weights)
        return FinishRequest(end.outcome, result, tuple(final))

    async def _call(
        self,
        reward: RewardFunction,
        lease: Lease,
        result: object,
        output: str,
        step_rewards: Sequence[Reward],
        acquired: Mapping[str, Any],
    ) -> GivenReward:
        """Return the final reward of an attempt that succeeded with `result`. Raises `NoReward` or `ServiceFailed`.

        The function receives the services that the agent has `acquired`, and acquires the others. The episode, if it
        takes one, is read from the server; output and step rewards, which the server does not have yet, are added.
        """

        async def read_episode() -> Episode:
            try:
                episode = await self._client.get_episode(lease.attempt.run, lease.attempt.id)
            except RemoteError as refused:
                raise NoReward(
                    f"the episode that the reward function takes cannot be read from the server: {refused}"
                ) from refused
            return replace(episode, rewards=(*episode.rewards, *step_rewards), output=output)

        missing = [name for name in reward.services if name not in acquired]
        async with self._services.acquire(missing) as more:
            return await reward.score(lease.task.input, result, read_episode, {**acquired, **more})

    async def _send(self, lease: Lease, request: FinishRequest) -> None:
        run, attempt = lease.attempt.run, lease.attempt.id
        try:
            reply = await self._client.finish(run, attempt, request)
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
                _log.warning("the server no longer knows attempt %s: %s", attempt, refused)
            else:
                raise
