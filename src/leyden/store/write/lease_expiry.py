"""Ends leases as they expire, and never because of a stall of the server.

While the event loop is blocked, the process is stopped or the machine is suspended, workers cannot renew their leases.
After such a stall, a step of the clock, or a time in which the database could not be written, every active lease gets
its full time again before any expires.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from leyden.background import start_background, wait_set
from leyden.records import Event, EventKind

_log = logging.getLogger("leyden.store")
_TICK_S, _STALL_S = 0.5, 1.0


class StallDetector:
    """Counts the times at which more, or less, time has passed than the event loop slept."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()
        self.stalls = 0

    def check(self) -> int:
        """Compare the clock with the last check and return how many stalls there were so far."""
        now = self._clock()
        unexpected = now - self._last - _TICK_S
        self._last = now
        if unexpected > _STALL_S or unexpected < -_TICK_S - _STALL_S:
            self.stalls += 1
            _log.warning("the clock advanced by %.1f s in one step: every lease gets its full time", unexpected)
        return self.stalls

    async def run(self) -> None:
        """Check again and again, so that a stall is seen even if nothing expires."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.check()


class ExpiringLeases(Protocol):
    """The store's operations on leases."""

    async def next_expiry(self) -> float | None:
        """Return when the next lease expires."""

    async def expire_leases(self, before: float) -> int:
        """End the leases that expired before a time."""

    async def renew_leases(self) -> None:
        """Give every active lease its full time."""


class LeaseExpiry:
    """Expires the leases of a store for as long as it runs; sleeps until the next expiry."""

    def __init__(self, leases: ExpiringLeases, clock: Callable[[], float], outages: Callable[[], int]) -> None:
        """`outages` returns how often the database has failed so far."""
        self._leases, self._clock, self._outages = leases, clock, outages
        self._failed = False
        self._planned: float | None = None
        self._sooner = asyncio.Event()
        self._detector, self._handled = StallDetector(clock), 0

    def on_event(self, event: Event) -> None:
        """Wake up if a new lease expires before the planned time."""
        starts = event.kind in (EventKind.ATTEMPT_STARTED, EventKind.SCORING_STARTED)
        if starts and (self._planned is None or event.data["expires"] < self._planned):
            self._sooner.set()

    async def run(self) -> None:
        """Expire leases until cancelled."""
        detecting = start_background(self._detector.run(), "the detection of stalls")
        try:
            while True:
                self._sooner.clear()
                if not await self._without_failing(self._expire_due):
                    self._planned = self._clock() + 1.0
                await wait_set(self._sooner, self._planned and self._planned - self._clock())
        finally:
            detecting.cancel()

    async def _expire_due(self) -> None:
        while True:
            self._planned = await self._leases.next_expiry()
            stalls, now = self._detector.check() + self._outages(), self._clock()
            if stalls != self._handled:
                await self._leases.renew_leases()
                self._handled = stalls
            elif self._planned is not None and self._planned <= now:
                await self._leases.expire_leases(now)  # a stall after this line expires no lease
            else:
                return

    async def _without_failing(self, work: Callable[[], Awaitable[None]]) -> bool:
        try:
            await work()
        except Exception as error:  # expiry continues after the database has recovered, from a full disk say
            if not self._failed:
                _log.warning("expired leases could not be ended; trying again: %s", error)
            self._failed = True
            return False
        self._failed = False
        return True
