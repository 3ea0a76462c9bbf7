"""Adapts the number of attempts that a lease loop runs at the same time to what the engine can serve.

More rollouts than the engine can serve only wait, and their data grows stale. While more calls wait than are
served, the limit falls by a fifth, at most once per as many finished attempts as the limit allows. While less than half
as many wait, each finished attempt raises it by one. In between it stays. It is never below one.
"""

import asyncio

_HIGH_PRESSURE, _LOW_PRESSURE = 1.0, 0.5
_DECREASE = 0.8


class ConcurrencyLimit:
    """A semaphore whose limit starts at `maximum` and follows the load of the engine."""

    def __init__(self, maximum: int) -> None:
        self._maximum = self._limit = maximum
        self._in_use = self._finished = 0
        self._changed = asyncio.Event()

    @property
    def limit(self) -> int:
        """How many slots may be in use now."""
        return self._limit

    async def acquire_all(self) -> int:
        """Wait for a free slot, take every free slot and return their number."""
        while self._in_use >= self._limit:
            self._changed.clear()
            await self._changed.wait()
        free = self._limit - self._in_use
        self._in_use = self._limit
        return free

    def release(self, slots: int = 1) -> None:
        """Return slots."""
        self._in_use -= slots
        self._changed.set()

    def adjust(self, queue_pressure: float | None) -> None:
        """Adjust the limit after a finished attempt to the number of waiting calls per served one (None: unknown)."""
        self._finished += 1
        if queue_pressure is None:
            return
        if queue_pressure > _HIGH_PRESSURE and self._finished >= self._limit:
            self._limit, self._finished = max(1, int(_DECREASE * self._limit)), 0
        elif queue_pressure < _LOW_PRESSURE and self._limit < self._maximum:
            self._limit += 1
            self._changed.set()
