"""Scores single attempts in the worker: calls the run's reward function with what it takes by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from leyden.api.client import RemoteError
from leyden.api.retrying import RetryingRemote
from leyden.api.wire import Lease
from leyden.client.rewards.function import NoReward, RewardFunction
from leyden.client.services.registry import ServiceRegistry
from leyden.episodes import Episode
from leyden.records import Reward


class AttemptScorer:
    """Calls a reward function for one attempt at a time. `GroupScorer` is its counterpart for whole groups."""

    def __init__(self, client: RetryingRemote, reward: RewardFunction, services: ServiceRegistry) -> None:
        self._client, self._reward, self._services = client, reward, services
        self.services = reward.services
        """Names of the services that the reward function takes."""

    async def score(
        self, lease: Lease, result: object, output: str, step_rewards: Sequence[Reward], acquired: Mapping[str, Any]
    ) -> float:
        """Return the final reward of an attempt that succeeded with `result`.

        The function receives the services that the agent has `acquired`, and acquires the others. The episode, if it
        takes one, is read from the server; output and step rewards, which the server does not have yet, are added.
        Raises `NoReward` or `ServiceFailed`.
        """

        async def read_episode() -> Episode:
            run, attempt = lease.attempt.run, lease.attempt.id
            try:
                episode = await self._client.get_episode(run, attempt)
            except RemoteError as refused:
                raise NoReward(
                    f"the episode that the reward function takes cannot be read from the server: {refused}"
                ) from refused
            return replace(episode, rewards=(*episode.rewards, *step_rewards), output=output)

        missing = [name for name in self.services if name not in acquired]
        async with self._services.acquire(missing) as more:
            return await self._reward.score(lease.task.input, result, read_episode, {**acquired, **more})
