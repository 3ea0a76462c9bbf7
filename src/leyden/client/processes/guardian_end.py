"""Waits for the end of a guardian whose control pipe says that it must end, although code of an agent may stop it."""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

from leyden.process.descendants import kill_tree
from leyden.process.guardian import KILL_TIMEOUT_S


async def wait_guardian(ended: "asyncio.Future[Any]", pid: int, timeout_s: float) -> None:
    """Wait until a guardian has ended. One that is stopped continues; at the time-out it and all below are killed."""
    if not ended.done():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    await asyncio.wait((ended,), timeout=timeout_s)
    if not ended.done():
        await asyncio.to_thread(kill_tree, pid, KILL_TIMEOUT_S)
    await asyncio.shield(ended)
