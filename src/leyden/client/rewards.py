"""The reward function of a run: called in the worker when an agent has ended well, with what it asks for by name."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from leyden.client.failures import describe
from leyden.client.loading import AnyCallable, LoadError
from leyden.client.results import NotAReward, read_reward
from leyden.episodes import Episode

_OFFERED = ("task", "result", "episode")


class NoReward(Exception):
    """There is no reward; the message says why."""


class RewardFunction:
    """A function of any of `task`, `result` and `episode`, sync (it gets a thread) or async."""

    def __init__(self, function: AnyCallable, reference: str, threads: Executor, limit_s: float) -> None:
        self._function = function
        self._threads = threads
        self._limit_s = limit_s
        self._asks = _parameters(function, reference)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )

    async def score(self, task: Any, result: Any, episode: Callable[[], Awaitable[Episode]]) -> float:
        """The reward; raises `NoReward` where the function fails, dawdles or answers with something else."""
        known: dict[str, Any] = {"task": task, "result": result}
        if "episode" in self._asks:
            known["episode"] = await episode()
        arguments = {name: known[name] for name in self._asks}
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                value = await self._call(arguments)
        except TimeoutError as error:
            why = f"gave no answer within {self._limit_s:g} s" if limit.expired() else f"failed: {describe(error)}"
            raise NoReward(f"the reward function {why}") from error
        except (Exception, SystemExit) as error:
            raise NoReward(f"the reward function failed: {describe(error)}") from error
        try:
            return read_reward(value, "the reward function")
        except NotAReward as error:
            raise NoReward(str(error)) from error

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(self._threads, lambda: self._function(**arguments))
        return await value if inspect.isawaitable(value) else value


def _parameters(function: AnyCallable, reference: str) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise LoadError(f"the reward function {reference!r} does not say what it takes: wrap it in a def") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [p.name for p in named if p.name not in _OFFERED and p.default is p.empty]
    if unknown or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise LoadError(
            f"the reward function {reference!r} takes {', '.join(p.name for p in parameters)}: "
            f"it may take any of {', '.join(_OFFERED)}"
        )
    return tuple(p.name for p in named if p.name in _OFFERED)
