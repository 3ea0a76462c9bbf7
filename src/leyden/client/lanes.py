"""A lane: one host at a time, the places it has, and the leases that fill them.

Each host has a pool of its own, so its key speaks for its own attempts only. A host that dies takes its attempts with
it; they end `lost`, and another host takes its place.
"""

import asyncio
import logging

from msgspec import Struct
from msgspec.structs import replace

from leyden.client.contact import Contact
from leyden.client.hosting import HostDied, HostProcess
from leyden.client.jobs import Job, Jobs
from leyden.client.loading import LoadError
from leyden.client.messages import Ended, Setup, Start
from leyden.client.reporting import Reporter
from leyden.outcomes import Ending, Outcome
from leyden.wire import KeySpec, Lease, LeaseRequest

_log = logging.getLogger("leyden.worker")
_WAIT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_TRIES = 3


class Terms(Struct, frozen=True, kw_only=True):
    """What a lane is told."""

    worker: str
    run: str | None
    time_limit_s: float
    setup: Setup
    """Of its hosts, but for the key that each is given."""


class Lane:
    """Leases as many attempts as it has free places, and sees each to its end. Its tasks live in the worker's group."""

    def __init__(
        self, tasks: asyncio.TaskGroup, contact: Contact, jobs: Jobs, reporter: Reporter, terms: Terms
    ) -> None:
        self._tasks, self._contact, self._jobs, self._reporter = tasks, contact, jobs, reporter
        self._terms = terms
        self._places = asyncio.Semaphore(terms.setup.places)
        self._hosted: dict[str, Job] = {}
        self._leasing: asyncio.Task[None] | None = None
        self._closing = self._any_ended = False

    async def work(self) -> None:
        """Work until cancelled, over as many hosts as it takes."""
        pause = _FIRST_PAUSE_S
        while True:
            pool = await self._contact.insist(lambda: self._contact.remote.make_key(KeySpec("pool", self._terms.run)))
            host = await self._start_host(pool.key)
            try:
                if not self._closing:
                    self._leasing = self._tasks.create_task(self._lease(host, pool.pool))
                self._any_ended = False
                await host.listen(self._hear)
                _log.warning("a host is gone with %d attempts: another takes its place", len(self._hosted))
            finally:
                if self._leasing is not None:
                    self._leasing.cancel()
                await asyncio.shield(host.close())
                self._lose(await host.death())
            pause = _FIRST_PAUSE_S if self._any_ended else min(_LONGEST_PAUSE_S, 2 * pause)
            await asyncio.sleep(pause)

    async def _start_host(self, key: str) -> HostProcess:
        """A host with the agent loaded. A death while loading may be bad luck; several are the agent's doing."""
        for _ in range(_TRIES):
            try:
                return await HostProcess.start(replace(self._terms.setup, key=key))
            except HostDied as died:
                how = died
                await asyncio.sleep(_FIRST_PAUSE_S)
        raise LoadError(f"{self._terms.setup.agent!r} cannot be loaded: its process dies of it ({how})")

    def stop_leasing(self) -> None:
        """Take no new work."""
        self._closing = True
        if self._leasing is not None:
            self._leasing.cancel()

    async def _lease(self, host: HostProcess, pool: str | None) -> None:
        """Keep the places filled; a lease on its way when this is cancelled the server takes back, or it runs out."""
        while True:
            await self._places.acquire()
            free = 1
            while not self._places.locked():
                await self._places.acquire()
                free += 1
            leases: list[Lease] = []
            request = LeaseRequest(self._terms.worker, min(free, 1000), _WAIT_S, self._terms.run, pool)
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
                self._hosted[job.id] = job
                job.task = self._tasks.create_task(self._look_after(job, host))

    async def _look_after(self, job: Job, host: HostProcess) -> None:
        """See an attempt to its end. Its place is free when it is reported and its code has returned."""
        lease = job.lease
        host.run(Start(job.id, lease.attempt.rollout, lease.traceparent, lease.task.input))
        limit_s = self._terms.time_limit_s
        late = Ended(job.id, Outcome(Ending.TIMEOUT, f"the agent took longer than {limit_s:g} s"))
        timer = asyncio.get_running_loop().call_later(limit_s, job.settle, late)
        try:
            ended = await job.settled
            timer.cancel()
            if not job.left.is_set():
                host.stop(job.id)
            if ended is not None:
                await self._reporter.report(lease, ended)
            self._jobs.remove(job)
            await job.left.wait()
        finally:
            timer.cancel()
            self._places.release()

    def _hear(self, ended: Ended) -> None:
        self._any_ended = True
        job = self._hosted.pop(ended.attempt)
        job.settle(ended)
        job.left.set()

    def _lose(self, how: str) -> None:
        """The host has died, and all that it hosted with it."""
        for job in self._hosted.values():
            job.settle(Ended(job.id, Outcome(Ending.LOST, f"the process that ran the agent died: {how}")))
            job.left.set()
        self._hosted.clear()
