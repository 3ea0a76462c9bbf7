"""Agents in Python: callables, and classes whose instances are created once per slot and reused between rollouts.

A callable takes the task and, by name, the attempt and services.
"""

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from leyden.api.wire import Lease
from leyden.user_code.bridge import wait_on
from leyden.user_code.loading import AnyCallable, LoadError, is_async

_log = logging.getLogger("leyden.host")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallableAgent:
    """A callable whose signature is checked once, so that an unusable agent is refused before any attempt starts."""

    def __init__(self, function: AnyCallable, reference: str, services: Collection[str] = ()) -> None:
        self._function = function
        names = _named_parameters(function, reference, services)
        self.wants_attempt = "attempt" in names
        self.services = tuple(name for name in names if name in services)
        """Names of the services that it takes."""
        self.is_async = is_async(function)

    def bind(self, task: Any, attempt: Lease, acquired: Mapping[str, Any] = {}) -> Callable[[], Any]:
        """Return the call of the agent for one attempt, with its arguments bound."""
        if self.wants_attempt:
            return lambda: self._function(task, attempt=attempt, **acquired)
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


class SetupFailed(Exception):
    """An instance could not be created: an infrastructure failure, not one of the model."""


class ClassAgent:
    """Gives each attempt an instance that no other attempt is using, creating one if all are in use.

    Instances are created, checked and closed in threads and outside any attempt's context, because they outlive it.
    """

    def __init__(self, kind: type, reference: str, concurrency: int, services: Collection[str] = ()) -> None:
        _check(kind, reference)
        self._kind, self._reference = kind, reference
        self._call = CallableAgent(partial(kind.__call__, None), reference, services)
        self.services = self._call.services
        """Names of the services that a call takes."""
        self._idle: list[Any] = []
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="instances")
        self._loop: asyncio.AbstractEventLoop | None = None

    def function(self) -> Callable[..., Any]:
        """Return a function that calls an exclusive instance."""
        return self._run_async if self._call.is_async else self._run

    def close(self) -> None:
        """Close the idle instances."""
        while self._idle:
            self._threads.submit(self._close, self._idle.pop())
        self._threads.shutdown(wait=True)

    def _run(self, task: Any, attempt: Lease, **services: Any) -> Any:
        instance = self._take()
        if instance is None:
            instance = self._create()
        try:
            value = self._call_instance(instance, task, attempt, services)
        except BaseException:
            self._check_health(instance)
            raise
        self._idle.append(instance)
        return value

    async def _run_async(self, task: Any, attempt: Lease, **services: Any) -> Any:
        loop = self._loop = asyncio.get_running_loop()
        instance = self._take()
        if instance is None:
            instance = await self._create_async(loop)
        try:
            value = await self._call_instance(instance, task, attempt, services)
        except BaseException:
            await asyncio.shield(loop.run_in_executor(self._threads, self._check_health, instance))
            raise
        self._idle.append(instance)
        return value

    def _call_instance(self, instance: Any, task: Any, attempt: Lease, services: dict[str, Any]) -> Any:
        return instance(task, attempt=attempt, **services) if self._call.wants_attempt else instance(task, **services)

    async def _create_async(self, loop: asyncio.AbstractEventLoop) -> Any:
        """Create an instance in a thread. If the attempt is stopped meanwhile, the instance is for another one."""
        creating = loop.run_in_executor(self._threads, self._create)
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            creating.add_done_callback(self._keep)
            raise

    def _keep(self, created: asyncio.Future[Any]) -> None:
        if not created.cancelled() and created.exception() is None:
            self._idle.append(created.result())

    def _take(self) -> Any:
        """Return an idle instance; None if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _create(self) -> Any:
        try:
            return contextvars.Context().run(self._kind)
        except BaseException as error:
            raise SetupFailed(f"{self._reference!r} could not be set up: {type(error).__name__}: {error}") from error

    def _check_health(self, instance: Any) -> None:
        """Keep an instance whose call failed, unless its `healthy` method returns False or raises."""
        try:
            healthy = self._call_optional(instance, "healthy", True)
        except Exception:
            healthy = False
        if healthy:
            self._idle.append(instance)
        else:
            self._close(instance)

    def _close(self, instance: Any) -> None:
        try:
            self._call_optional(instance, "aclose" if hasattr(instance, "aclose") else "close")
        except Exception:
            _log.exception("%r could not be closed", self._reference)

    def _call_optional(self, instance: Any, name: str, default: Any = None) -> Any:
        """Call an optional method outside any attempt's context; on the event loop if it is async."""
        method = getattr(instance, name, None)
        if method is None:
            return default
        value = contextvars.Context().run(method)
        if not inspect.isawaitable(value):
            return value
        return wait_on(value, self._loop)


def _check(kind: type, reference: str) -> None:
    if not any("__call__" in vars(base) for base in kind.__mro__):
        raise LoadError(f"the class {reference!r} cannot be an agent: give it a method __call__(self, task)")
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    if needed:
        raise LoadError(f"the class {reference!r} is created without arguments: give {', '.join(needed)} defaults")
