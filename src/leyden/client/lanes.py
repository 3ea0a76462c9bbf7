"""A lane: one runner at a time, the places it has, and the leases that fill them.

A runner that dies takes its attempts with it; they end `lost`, and another takes its place.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec import Struct
from msgspec.structs import replace

from leyden.client.contact import Contact
from leyden.client.jobs import Job, Jobs
from leyden.client.messages import Ended, Rewarded
from leyden.client.reporting import Reporter
from leyden.client.running import Runner
from leyden.outcomes import Ending, Outcome
from leyden.wire import Lease, LeaseRequest

_log = logging.getLogger("leyden.worker")
_WAIT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class Terms(Struct, frozen=True, kw_only=True):
    """What a lane is told."""

    worker: str
    run: str | None
    time_limit_s: float
    places: int
    begin: Callable[[], Awaitable[Runner]]
    """Start what runs its attempts."""


class Lane:
    """Leases as many attempts as it has free places, and sees each to its end. Its tasks live in the worker's group."""

    def __init__(
        self, tasks: asyncio.TaskGroup, contact: Contact, jobs: Jobs, reporter: Reporter, terms: Terms
    ) -> None:
        self._tasks, self._contact, self._jobs, self._reporter = tasks, contact, jobs, reporter
        self._terms = terms
        self._places = asyncio.Semaphore(terms.places)
        self._running: dict[str, Job] = {}
        self._leasing: asyncio.Task[None] | None = None
        self._closing = self._any_ended = False

    async def work(self) -> None:
        """Work until cancelled, over as many runners as it takes."""
        pause = _FIRST_PAUSE_S
        while True:
            runner = await self._terms.begin()
            try:
                if not self._closing:
                    self._leasing = self._tasks.create_task(self._lease(runner))
                self._any_ended = False
                await runner.listen(self._hear)
                _log.warning("a host is gone with %d attempts: another takes its place", len(self._running))
            finally:
                if self._leasing is not None:
                    self._leasing.cancel()
                await asyncio.shield(runner.close())
                self._lose(await runner.death())
            pause = _FIRST_PAUSE_S if self._any_ended else min(_LONGEST_PAUSE_S, 2 * pause)
            await asyncio.sleep(pause)

    def stop_leasing(self) -> None:
        """Take no new work."""
        self._closing = True
        if self._leasing is not None:
            self._leasing.cancel()

    async def _lease(self, runner: Runner) -> None:
        """Keep the places filled; a lease on its way when this is cancelled the server takes back, or it runs out."""
        while True:
            await self._places.acquire()
            free = 1
            while not self._places.locked():
                await self._places.acquire()
                free += 1
            leases: list[Lease] = []
            request = LeaseRequest(self._terms.worker, min(free, 1000), _WAIT_S, self._terms.run, runner.pool)
            try:
                leases = await self._contact.insist(
                    lambda: self._contact.remote.lease(request),  # noqa: B023 - awaited here
                    within_s=_WAIT_S + 10,
                )
            finally:
                for _ in range(free - len(leases)):
                    self._places.release()
            for lease in leases:
                job = Job(lease)
                self._jobs.add(job)
                self._running[job.id] = job
                job.task = self._tasks.create_task(self._look_after(job, runner))

    async def _look_after(self, job: Job, runner: Runner) -> None:
        """See an attempt to its end. Its place is free when it is reported and its code has returned."""
        lease = job.lease
        runner.run(lease)
        limit_s = self._terms.time_limit_s
        late = Ended(job.id, Outcome(Ending.TIMEOUT, f"the agent took longer than {limit_s:g} s"))
        timer = asyncio.get_running_loop().call_later(limit_s, job.settle, late)
        try:
            ended = await job.settled
            timer.cancel()
            if not job.left.is_set():
                printed = await runner.stop(job.id)
                ended = replace(ended, output=printed) if ended is not None else None
            if ended is not None:
                await self._reporter.report(lease, ended, tuple(job.rewards))
            self._jobs.remove(job)
            await job.left.wait()
        finally:
            timer.cancel()
            self._places.release()

    def _hear(self, said: Ended | Rewarded) -> None:
        if isinstance(said, Rewarded):
            if (known := self._running.get(said.attempt)) is not None:
                known.rewards.append(said.reward)
            return
        self._any_ended = True
        job = self._running.pop(said.attempt)
        job.settle(said)
        job.left.set()

    def _lose(self, how: str) -> None:
        """The runner is gone, and all that it ran with it."""
        for job in self._running.values():
            job.settle(Ended(job.id, Outcome(Ending.LOST, f"the process that ran the agent died: {how}")))
            job.left.set()
        self._running.clear()
