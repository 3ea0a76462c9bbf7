"""Tasks that run in the background. One that fails logs its traceback at once, even if nothing awaits it."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger("leyden.background")


def start_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task; keep the reference. `name` is a noun phrase for the log, such as "the expiry of leases"."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed", task.get_name(), exc_info=error)
