"""Whose code keeps an event loop from running.

A loop that is blocked cannot be asked. Its thread can: a signal's handler runs between two instructions of whatever the
thread is at, in the context of that, and so knows the attempt. Only code that never comes back from C stays unnamed.
"""

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from leyden.client.tracing.context import current_attempt

_SIGNAL = signal.SIGUSR2
_SOON_S = 0.25


class WatchedLoop:
    """The loop of this process's main thread, in which this is made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._asking = threading.Lock()
        self._told: SimpleQueue[str | None] = SimpleQueue()
        signal.signal(_SIGNAL, self._tell)

    def blocked_by(self, hear: Callable[[str | None], None]) -> None:
        """Find out, in a thread; None where the loop runs, or it cannot be told."""
        threading.Thread(target=lambda: hear(self._find()), name="leyden-blocking", daemon=True).start()

    def _find(self) -> str | None:
        runs = threading.Event()
        self._loop.call_soon_threadsafe(runs.set)
        if runs.wait(_SOON_S):
            return None
        with self._asking:
            if signal.getsignal(_SIGNAL) != self._tell:  # the agent wants it for itself
                return None
            self._told = SimpleQueue()  # an answer that came too late is not one to this question
            signal.pthread_kill(self._thread, _SIGNAL)
            with suppress(Empty):
                return self._told.get(timeout=_SOON_S)
        return None

    def _tell(self, *_: Any) -> None:
        self._told.put(current_attempt())
