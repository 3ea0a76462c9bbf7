"""An attempt in the worker's hands, and the heartbeats that keep it there."""

import asyncio
from contextlib import suppress

from leyden.client.contact import Contact
from leyden.client.messages import Ended
from leyden.records import Reward
from leyden.wire import Lease


class Job:
    """One leased attempt. Whoever settles it first says how it ended."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.id = lease.attempt.id
        self.settled: asyncio.Future[Ended | None] = asyncio.get_running_loop().create_future()
        """None: the server has ended the attempt, and there is nothing to report."""
        self.left = asyncio.Event()
        """Its code has returned, or the process that ran it is gone."""
        self.rewards: list[Reward] = []
        """Those that it gave on its way, in order."""
        self.task: asyncio.Task[None] | None = None

    def settle(self, ended: Ended | None) -> None:
        """Say how it ended, unless that was said before."""
        if not self.settled.done():
            self.settled.set_result(ended)

    def abandon(self) -> None:
        """Leave it as it is: nothing more is done for it here."""
        if self.task is not None:
            self.task.cancel()


class Jobs:
    """The attempts that the worker is at: one heartbeat for all of them, at a third of the shortest lease."""

    def __init__(self, contact: Contact, worker: str) -> None:
        self._contact, self._worker = contact, worker
        self._live: dict[str, Job] = {}
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def all(self) -> list[Job]:
        """The jobs as they are now."""
        return list(self._live.values())

    def add(self, job: Job) -> None:
        """Keep an attempt alive from now on."""
        if not self._live or job.lease.lease_s < self._shortest():
            self._changed.set()
        self._live[job.id] = job
        self._idle.clear()

    def remove(self, job: Job) -> None:
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
            lambda: self._contact.remote.beat(self._worker, ids), within_s=max(1.0, interval), pause_s=interval
        )
        for ended in reply.ended:
            job = self._live.get(ended.attempt)
            if job is not None:
                job.settle(None)

    def _shortest(self) -> float:
        return min(job.lease.lease_s for job in self._live.values())
