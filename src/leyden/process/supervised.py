"""Starts a process again when it ends, unless it ends too often."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import NoReturn, Self


class SupervisedProcess(ABC):
    """A process that a task supervises until it has failed for good. As a context, it is started and stopped."""

    def __init__(self, name: str, max_failures: int, within_s: float, error: type[Exception]) -> None:
        """If it fails `max_failures` times within `within_s`, it is not started again, and `error` says so."""
        self._name, self._max_failures, self._within_s, self._error = name, max_failures, within_s, error
        self._supervising: asyncio.Task[NoReturn] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @abstractmethod
    async def start(self) -> None:
        """Start it, and call `_start_supervising` when it is ready. Raises an error that says why it is not."""

    async def stop(self) -> None:
        """End it, also if this is cancelled."""
        try:
            if self._supervising is not None:
                self._supervising.cancel()
                await asyncio.wait({self._supervising})
        finally:
            await self._end()

    @property
    def is_gone(self) -> bool:
        """Whether it has ended and is not started again."""
        return self._supervising is not None and self._supervising.done()

    async def wait_failed(self) -> NoReturn:
        """Wait until starting it again is useless, and raise an error that says why."""
        assert self._supervising is not None
        await asyncio.shield(self._supervising)
        raise AssertionError("supervising ends only with an error")

    @abstractmethod
    async def _end(self) -> None:
        """End it for good; it may have ended."""

    @abstractmethod
    async def _wait_ended(self) -> str:
        """Wait until it has ended and return a sentence that says how. Raises an error if that was the last time."""

    @abstractmethod
    async def _restart(self, reason: str) -> str | None:
        """Start it again. Returns a reason if it ended at once; raises an error if another try is useless."""

    def _clock(self) -> float:
        """Return the time by which failures are counted."""
        return time.monotonic()

    def _start_supervising(self) -> None:
        self._supervising = asyncio.create_task(self._supervise())

    async def _supervise(self) -> NoReturn:
        failures: deque[float] = deque(maxlen=self._max_failures)
        reason = await self._wait_ended()
        while True:
            failures.append(self._clock())
            if len(failures) == self._max_failures and failures[-1] - failures[0] < self._within_s:
                raise self._error(f"{self._name} keeps dying: {reason}")
            reason = await self._restart(reason) or await self._wait_ended()
