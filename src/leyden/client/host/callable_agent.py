"""An agent that is a Python callable: sync or async, taking the task, and the attempt too if it asks by name."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct

from leyden.loading import AnyCallable, LoadError

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


class CallableAgent:
    """A callable that was looked at once, so that what cannot work is refused before any work starts."""

    def __init__(self, function: AnyCallable, reference: str, services: Collection[str] = ()) -> None:
        self._function = function
        asked = _asked_for(function, reference, services)
        self.wants_attempt = "attempt" in asked
        self.services = tuple(name for name in asked if name in services)
        """Those that it asks for by name."""
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )

    def bind(self, task: Any, invocation: Invocation, lent: Mapping[str, Any] = {}) -> Callable[[], Any]:
        """The call of one attempt, ready to be made."""
        if self.wants_attempt:
            return lambda: self._function(task, attempt=invocation, **lent)
        return lambda: self._function(task, **lent)


def _asked_for(function: AnyCallable, reference: str, services: Collection[str]) -> list[str]:
    """Raise unless the function can be called with a task; what it asks for by name beside it."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, and saying nothing of itself
        return []
    asked = [name for name in parameters if name == "attempt" or name in services]
    others = [p for name, p in parameters.items() if name not in asked]
    places = [p for p in others if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not places:
        raise LoadError(f"the agent {reference!r} has no parameter for the task: write def agent(task)")
    task = places[0]
    needed = [p.name for p in others if p is not task and p.default is p.empty and p.kind not in _COLLECTING]
    if needed:
        names = ", ".join([task.name, *needed])
        raise LoadError(
            f"the agent {reference!r} takes {names}: it is given the task, the attempt if a parameter is named "
            f"`attempt`, and services by their names ({', '.join(services) or 'there are none'}); "
            "give the others defaults"
        )
    return asked
