"""Watches the event loop: for how long it was blocked, and by the code of which attempt.

A blocked loop cannot run a callback, but its thread can run a signal handler, which executes between two bytecode
instructions, in the context of the blocking code. Only code that does not return from C cannot be found.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from leyden.client.tracing.context import current_attempt

_SIGNAL = signal.SIGUSR2
_TIMEOUT_S = 0.25
"""A loop that runs nothing for longer is blocked."""
_ANSWER_TIMEOUT_S = 1.0
"""How long the handler of the signal may take, on a busy machine. A stop is answered within 2 s."""
_TICK_S = 0.25


class WatchedLoop:
    """The event loop of the main thread. Create this object in the main thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._answers: SimpleQueue[str | None] = SimpleQueue()
        signal.signal(_SIGNAL, self._on_signal)
        self._measured = (0.0, time.monotonic())
        """Seconds blocked until the last tick, and when the next one is due; replaced as one, for other threads."""
        self._tick()

    def blocked_s(self) -> float:
        """Return for how many seconds in all the loop was blocked so far. Callable from any thread."""
        blocked_s, due = self._measured
        late_s = time.monotonic() - due
        return blocked_s + (late_s if late_s > _TIMEOUT_S else 0.0)

    def _tick(self) -> None:
        self._measured = (self.blocked_s(), time.monotonic() + _TICK_S)
        self._loop.call_later(_TICK_S, self._tick)

    def find_blocker(self, on_found: Callable[[str | None], None]) -> None:
        """Find the blocking attempt in a thread; None if the loop runs or the attempt cannot be determined."""
        threading.Thread(target=lambda: on_found(self._find()), name="leyden-blocker", daemon=True).start()

    def _find(self) -> str | None:
        ran = threading.Event()
        self._loop.call_soon_threadsafe(ran.set)
        if ran.wait(_TIMEOUT_S):
            return None
        with self._lock:
            if signal.getsignal(_SIGNAL) != self._on_signal:  # the agent uses the signal itself
                return None
            self._answers = SimpleQueue()  # drop an answer to an earlier signal
            signal.pthread_kill(self._thread, _SIGNAL)
            with suppress(Empty):
                return self._answers.get(timeout=_ANSWER_TIMEOUT_S)
        return None

    def _on_signal(self, *_: Any) -> None:
        self._answers.put(current_attempt())
