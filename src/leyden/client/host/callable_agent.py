"""Agents that are Python callables, sync or async. They take the task and, by name, the attempt and services."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from leyden.client.host_protocol import Invocation
from leyden.user_code.loading import AnyCallable, LoadError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallableAgent:
    """A callable whose signature is checked once, so that an unusable agent is refused before any attempt starts."""

    def __init__(self, function: AnyCallable, reference: str, services: Collection[str] = ()) -> None:
        self._function = function
        names = _named_parameters(function, reference, services)
        self.wants_attempt = "attempt" in names
        self.services = tuple(name for name in names if name in services)
        """Names of the services that it takes."""
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )

    def bind(self, task: Any, invocation: Invocation, acquired: Mapping[str, Any] = {}) -> Callable[[], Any]:
        """Return the call of the agent for one attempt, with its arguments bound."""
        if self.wants_attempt:
            return lambda: self._function(task, attempt=invocation, **acquired)
        return lambda: self._function(task, **acquired)


def _named_parameters(function: AnyCallable, reference: str, services: Collection[str]) -> list[str]:
    """Return the parameters to pass by name; raise if the function cannot be called with a task."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return []
    named = [name for name in parameters if name == "attempt" or name in services]
    others = [p for name, p in parameters.items() if name not in named]
    positional = [p for p in others if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not positional:
        raise LoadError(f"the agent {reference!r} has no parameter for the task: write def agent(task)")
    task = positional[0]
    required = [p.name for p in others if p is not task and p.default is p.empty and p.kind not in _VARIADIC]
    if required:
        names = ", ".join([task.name, *required])
        raise LoadError(
            f"the agent {reference!r} takes {names}: it is called with the task, with the attempt if a parameter is "
            f"named `attempt`, and with services by name ({', '.join(services) or 'there are none'}); "
            "give the other parameters defaults"
        )
    return named
