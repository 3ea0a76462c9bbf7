"""Runs the reward function of a run in the worker, with the arguments it takes by name.

Each try has a time limit. A failed try is repeated with back-off; if the last one fails, the rollout has no reward and
the message says why. A function that takes `group` scores the rollouts of a task together.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from leyden.backoff import Backoff
from leyden.client.attempt.errors import describe
from leyden.client.attempt.result import NotAReward, parse_final_reward
from leyden.config.schema import RolloutConfig
from leyden.episodes import Episode
from leyden.records import GivenReward
from leyden.user_code.bridge import await_on, background_loop, call_in_thread
from leyden.user_code.loading import AnyCallable, LoadError, is_async, load_function, placeholder_keys

T = TypeVar("T")

_SINGLE = ("task", "result", "episode")
_GROUP = ("task", "group")
_BACKOFF = Backoff(first_s=0.5, max_s=30.0)


class NoReward(Exception):
    """There is no reward; the message says why."""


class Unrewarded(NoReward):
    """The function returned None, which is allowed: the rollout has no reward."""


class RewardFunction:
    """A function of any of `task`, `result` and `episode`, or of `task` and `group`, and of services by name.

    A sync function runs in a thread and an async one on a background loop, so it cannot block the worker's heartbeats.
    """

    def __init__(
        self, function: AnyCallable, reference: str, rollout: RolloutConfig, services: Sequence[str] = ()
    ) -> None:
        self._function, self._tries, self._limit_s = function, rollout.reward_tries, rollout.reward_time_limit_s
        names = _parameters(function, reference, services)
        self._names = [name for name in names if name not in services]
        self.services = tuple(name for name in names if name in services)
        """Names of the services that it takes."""
        self.takes_group = "group" in self._names
        self._is_async = is_async(function)
        self.weights = rollout.reward_weights
        """Of the parts that its rewards have."""

    async def score(
        self, task: Any, result: Any, episode: Callable[[], Awaitable[Episode]], acquired: Mapping[str, Any] = {}
    ) -> GivenReward:
        """Return the reward of one rollout; raise `NoReward` if it has none."""
        arguments: dict[str, Any] = {"task": task, "result": result, **acquired}
        if "episode" in self._names:
            arguments["episode"] = await episode()
        return await self._call_with_retries(arguments, _parse_one)

    async def score_group(
        self, task: Any, group: Sequence[Episode], acquired: Mapping[str, Any] = {}
    ) -> dict[str, GivenReward | None]:
        """Return the reward of each rollout by its id, None if it has none; raise `NoReward` if the function fails."""
        arguments = {"task": task, "group": list(group), **acquired}
        return await self._call_with_retries(
            arguments, lambda answer: _parse_many(answer, [one.rollout.id for one in group])
        )

    async def _call_with_retries(self, available: Mapping[str, Any], parse: Callable[[Any], T]) -> T:
        arguments = {name: available[name] for name in (*self._names, *self.services)}

        async def call() -> T:
            return parse(await self._try(arguments))

        try:
            return await _BACKOFF.retry(call, self._tries, (_RewardFailed, NotAReward))
        except (_RewardFailed, NotAReward) as failed:
            raise NoReward(str(failed)) from failed

    async def _try(self, arguments: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                if self._is_async:
                    return await await_on(self._function(**arguments), background_loop())
                return await call_in_thread(lambda: self._function(**arguments), background_loop())
        except TimeoutError as error:
            if limit.expired():
                raise _RewardFailed(f"the reward function did not return within {self._limit_s:g} s") from error
            raise _RewardFailed(f"the reward function failed: {describe(error)}") from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # it is the worker that cancels, and not the function
            raise _RewardFailed("the reward function failed: it raised CancelledError") from error
        except (Exception, SystemExit) as error:
            raise _RewardFailed(f"the reward function failed: {describe(error)}") from error


class _RewardFailed(Exception):
    """One try failed."""


def load_reward(reference: str, base: str, rollout: RolloutConfig, services: Sequence[str] = ()) -> RewardFunction:
    """Load the reward function that a reference names; raise `LoadError` if it cannot be used."""
    with placeholder_keys():
        function = load_function(reference, base)
    return RewardFunction(function, reference, rollout, services)


def _parse_one(answer: Any) -> GivenReward:
    if answer is None:
        raise Unrewarded("the reward function returned None: there is no reward")
    return parse_final_reward(answer, "the reward function")


def _parse_many(answer: Any, rollouts: Sequence[str]) -> dict[str, GivenReward | None]:
    """Parse one reward per rollout, given in their order or by their ids."""
    if isinstance(answer, Mapping):
        unknown = [name for name in answer if name not in rollouts]
        if unknown:
            raise NotAReward(f"the reward function gave a reward for {unknown[0]!r}, which is not in the group")
        given = [answer.get(name) for name in rollouts]
    else:
        try:
            given = list(answer)
        except TypeError as error:
            raise NotAReward(
                f"the reward function gave {answer!r:.200} for a group: return one number for each rollout in it"
            ) from error
        if len(given) != len(rollouts):
            raise NotAReward(f"the reward function gave {len(given)} rewards for a group of {len(rollouts)}")
    return {
        name: None if value is None else parse_final_reward(value, "the reward function")
        for name, value in zip(rollouts, given, strict=True)
    }


def _parameters(function: AnyCallable, reference: str, services: Sequence[str]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise LoadError(f"the reward function {reference!r} has no signature: wrap it in a def") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    offered = (*(_GROUP if any(p.name == "group" for p in named) else _SINGLE), *services)
    unknown = [p.name for p in named if p.name not in offered and p.default is p.empty]
    if unknown or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise LoadError(
            f"the reward function {reference!r} takes {', '.join(p.name for p in parameters)}: "
            f"it may take any of {', '.join((*_SINGLE, *services))}, or {' and '.join((*_GROUP, *services))} "
            "to score the rollouts of a task together"
        )
    return tuple(p.name for p in named if p.name in offered)
