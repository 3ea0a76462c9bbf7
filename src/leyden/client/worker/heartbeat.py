"""An attempt in the worker's hands, and the heartbeats that keep it there."""

import asyncio
from contextlib import suppress

from leyden.client.attempt.leased import ActiveAttempt
from leyden.client.retrying_client import RetryingClient


class Heartbeat:
    """The attempts that the worker is at: one heartbeat for all of them, at a third of the shortest lease."""

    def __init__(self, contact: RetryingClient, worker: str) -> None:
        self._contact, self._worker = contact, worker
        self._live: dict[str, ActiveAttempt] = {}
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def all(self) -> list[ActiveAttempt]:
        """The jobs as they are now."""
        return list(self._live.values())

    def add(self, job: ActiveAttempt) -> None:
        """Keep an attempt alive from now on."""
        if not self._live or job.lease.lease_s < self._shortest():
            self._changed.set()
        self._live[job.id] = job
        self._idle.clear()

    def remove(self, job: ActiveAttempt) -> None:
        """An attempt is reported, or needs no report."""
        self._live.pop(job.id, None)
        if not self._live:
            self._idle.set()

    async def wait_idle(self, within_s: float) -> bool:
        """Wait until every attempt is reported; whether that came to pass."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), within_s)
        return not self._live

    async def beat(self) -> None:
        """Send heartbeats for as long as the worker lives."""
        while True:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._shortest() / 3 if self._live else None)
                continue  # a shorter lease has come in: count from it
            if self._live:
                await self._beat(self._shortest() / 3)

    async def _beat(self, interval: float) -> None:
        ids = list(self._live)
        reply = await self._contact.insist(
            lambda: self._contact.remote.heartbeat(self._worker, ids), within_s=max(1.0, interval), pause_s=interval
        )
        for ended in reply.ended:
            job = self._live.get(ended.attempt)
            if job is not None:
                job.settle(None)

    def _shortest(self) -> float:
        return min(job.lease.lease_s for job in self._live.values())
