"""Measures how long the event loop is blocked, exports it, and logs what blocked it."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Histogram

_log = logging.getLogger("leyden.server")
_TICK_S = 0.1
_BLOCKED_S = 0.5
"""A block this long is logged."""
_MAX_FRAMES = 6
_IDLE_SHARE = 0.2
"""A process that used less of the time than this was stopped, or had no CPU; its own code is not the cause."""


class LoopWatchdog:
    """Watches the running event loop between entering and leaving the context.

    The loop records the time at every tick. A thread wakes up when a tick would be overdue, and no more often, because
    the loop waits for it then. If a tick is overdue, it takes the stack of the loop's thread. While C code holds the
    GIL that thread waits too, and it takes the stack when that code returns, still in its caller.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "leyden_loop_lag_seconds",
            "How late the event loop runs what is due",
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
            registry=registry,
        )
        self._blocked = Counter("leyden_loop_blocked_seconds", "Time in long blocks of the loop", registry=registry)
        self._closed = threading.Event()
        self._stack = ""
        self._ticked = self._cpu = 0.0

    async def __aenter__(self) -> Self:
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._note_time()
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._thread = threading.Thread(target=self._watch, name="leyden-watchdog", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._closed.set()

    def _tick(self) -> None:
        late = time.monotonic() - self._ticked - _TICK_S
        self._lag.observe(max(0.0, late))
        if late > _BLOCKED_S:
            self._blocked.inc(late)
            self._report(late, time.process_time() - self._cpu)
        self._note_time()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _note_time(self) -> None:
        self._stack = ""
        self._cpu = time.process_time()
        self._ticked = time.monotonic()

    def _report(self, late: float, cpu: float) -> None:
        if cpu < _IDLE_SHARE * late:
            _log.warning("the server did not run for %.1f s: it was stopped, or the machine is busy or slept", late)
        else:
            _log.warning("the event loop was blocked for %.1f s in %s", late, self._stack or "an unknown place")

    def _watch(self) -> None:
        while not self._closed.wait(max(_TICK_S, self._overdue_in())):
            if not self._stack and self._overdue_in() < 0:
                self._stack = " < ".join(_innermost(sys._current_frames().get(self._thread_id)))

    def _overdue_in(self) -> float:
        """Return the time until the next tick is overdue."""
        return self._ticked + _TICK_S + _BLOCKED_S - time.monotonic()


def _innermost(frame: FrameType | None) -> Iterator[str]:
    """Describe the innermost frames, without their source: to read files, the thread would wait for the GIL again."""
    for _ in range(_MAX_FRAMES):
        if frame is not None:
            yield f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
            frame = frame.f_back
