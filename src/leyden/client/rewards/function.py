"""The reward function of a run: called in the worker with what it asks for by name, as often as its patience lasts.

It may be slow, remote and fallible. Each try has a time limit, and one that fails is followed by another after a while;
what fails to the last has no reward, and says why. A function that takes `group` scores a task's rollouts together.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from leyden import defaults
from leyden.backoff import Backoff
from leyden.client.attempt.errors import describe
from leyden.client.attempt.result import NotAReward, parse_reward
from leyden.client.user_code import await_on, background_loop, call_in_thread
from leyden.episodes import Episode
from leyden.loading import AnyCallable, LoadError, load_function, placeholder_keys

T = TypeVar("T")

_ALONE = ("task", "result", "episode")
_TOGETHER = ("task", "group")
_BACKOFF = Backoff(first_s=0.5, max_s=30.0)


class NoReward(Exception):
    """There is no reward; the message says why."""


class Unrewarded(NoReward):
    """It gave None, as it may."""


class RetryPolicy(Struct, frozen=True):
    """How long one try may take, and how many there are."""

    limit_s: float = defaults.REWARD_TIME_LIMIT_S
    tries: int = defaults.REWARD_TRIES


class RewardFunction:
    """A function of any of `task`, `result` and `episode`, or of `task` and `group`, and of services by their names.

    Sync or async: it gets a thread of its own, or runs on a loop apart. It cannot keep the worker from its heartbeats.
    """

    def __init__(
        self,
        function: AnyCallable,
        reference: str,
        patience: RetryPolicy,
        services: Sequence[str] = (),
    ) -> None:
        self._function, self._patience = function, patience
        asks = _parameters(function, reference, services)
        self._asks = [name for name in asks if name not in services]
        self.services = tuple(name for name in asks if name in services)
        """Those that it asks for."""
        self.takes_group = "group" in self._asks
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )

    async def score(
        self,
        task: Any,
        result: Any,
        episode: Callable[[], Awaitable[Episode]],
        lent: Mapping[str, Any] = {},
    ) -> float:
        """The reward of one rollout; raises `NoReward` where there is none to be had."""
        known: dict[str, Any] = {"task": task, "result": result, **lent}
        if "episode" in self._asks:
            known["episode"] = await episode()
        return await self._insist(known, _read_one)

    async def score_group(
        self,
        task: Any,
        group: Sequence[Episode],
        lent: Mapping[str, Any] = {},
    ) -> dict[str, float | None]:
        """The reward of each rollout, by its id, None where it has none; raises `NoReward` where no answer comes."""
        known = {"task": task, "group": list(group), **lent}
        return await self._insist(known, lambda answer: _read_many(answer, [one.rollout.id for one in group]))

    async def _insist(self, known: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        arguments = {name: known[name] for name in (*self._asks, *self.services)}
        tries = 0
        while True:
            tries += 1
            try:
                return read(await self._try(arguments))
            except (_RewardFailed, NotAReward) as failed:
                if tries == self._patience.tries:
                    raise NoReward(str(failed)) from failed
            await _BACKOFF.wait(tries)

    async def _try(self, arguments: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._patience.limit_s) as limit:
                if self._is_async:
                    return await await_on(self._function(**arguments), background_loop())
                return await call_in_thread(lambda: self._function(**arguments), background_loop())
        except TimeoutError as error:
            if limit.expired():
                raise _RewardFailed(
                    f"the reward function gave no answer within {self._patience.limit_s:g} s"
                ) from error
            raise _RewardFailed(f"the reward function failed: {describe(error)}") from error
        except (Exception, SystemExit) as error:
            raise _RewardFailed(f"the reward function failed: {describe(error)}") from error


class _RewardFailed(Exception):
    """A try that came to nothing."""


def load_reward(reference: str, base: str, patience: RetryPolicy, services: Sequence[str] = ()) -> RewardFunction:
    """The reward function that a reference names; raises `LoadError` where it cannot be one."""
    with placeholder_keys():
        function = load_function(reference, base)
    return RewardFunction(function, reference, patience, services)


def _read_one(answer: Any) -> float:
    if answer is None:
        raise Unrewarded("the reward function gave None: there is no reward")
    return parse_reward(answer, "the reward function")


def _read_many(answer: Any, rollouts: Sequence[str]) -> dict[str, float | None]:
    """One number for each rollout, in their order or by their ids."""
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
        name: None if value is None else parse_reward(value, "the reward function")
        for name, value in zip(rollouts, given, strict=True)
    }


def _parameters(function: AnyCallable, reference: str, services: Sequence[str]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise LoadError(f"the reward function {reference!r} does not say what it takes: wrap it in a def") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    offered = (*(_TOGETHER if any(p.name == "group" for p in named) else _ALONE), *services)
    unknown = [p.name for p in named if p.name not in offered and p.default is p.empty]
    if unknown or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise LoadError(
            f"the reward function {reference!r} takes {', '.join(p.name for p in parameters)}: "
            f"it may take any of {', '.join((*_ALONE, *services))}, or {' and '.join((*_TOGETHER, *services))} "
            "to score the rollouts of a task together"
        )
    return tuple(p.name for p in named if p.name in offered)
