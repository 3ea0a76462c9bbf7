"""An agent that is a Python callable: sync or async, taking the task, and the attempt too if it asks by name."""

import inspect
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from leyden.client.loading import AnyCallable, LoadError

_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Invocation(Struct, frozen=True):
    """What an agent gets to know of the attempt that it is called for."""

    id: str
    rollout: str
    base_url: str
    """Where OpenAI's clients find the model."""
    key: str
    """Of the process, good for its attempts only: a call needs the attempt's `traceparent` beside it."""
    traceparent: str


class Agent:
    """A callable that was looked at once, so that what cannot work is refused before any work starts."""

    def __init__(self, function: AnyCallable, reference: str) -> None:
        self._function = function
        self.wants_attempt = _takes_attempt(function, reference)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )

    def bind(self, task: Any, invocation: Invocation) -> Callable[[], Any]:
        """The call of one attempt, ready to be made."""
        if self.wants_attempt:
            return lambda: self._function(task, attempt=invocation)
        return lambda: self._function(task)


def _takes_attempt(function: AnyCallable, reference: str) -> bool:
    """Raise unless the function can be called with a task; whether it takes the attempt as well."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, and saying nothing of itself
        return False
    wants = "attempt" in parameters
    others = [p for name, p in parameters.items() if name != "attempt"]
    places = [p for p in others if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not places:
        raise LoadError(f"the agent {reference!r} has no parameter for the task: write def agent(task)")
    task = places[0]
    needed = [p.name for p in others if p is not task and p.default is p.empty and p.kind not in _COLLECTING]
    if needed:
        names = ", ".join([task.name, *needed])
        raise LoadError(
            f"the agent {reference!r} takes {names}: it is given the task, and the attempt if a parameter is named "
            "`attempt`; give the others defaults"
        )
    return wants
