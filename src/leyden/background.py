"""Tasks that run in the background, waiting for events, and the signals to stop.

A task that fails logs its traceback at once, even if nothing awaits it.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger("leyden.background")


def start_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task; keep the reference. `name` is a noun phrase for the log, such as "the expiry of leases"."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, T]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Run coroutines within this context, as tasks; at its end those that are not done are cancelled and waited for.

    An error of a task is for whoever reads its result.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until an event is set, but not longer than a time; return whether it is set.

    Unlike `asyncio.wait_for`, it cannot lose a cancellation that comes with the event.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


def stop_signal() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed", task.get_name(), exc_info=error)
