"""A lane: so many places, the leases that fill them, and one station after another at which they are run.

Leasing goes on while one station takes the place of another, so that no place is idle for it. An attempt whose rollout
died with its process before has a station to itself: there it can take nobody with it, and its death is its own doing.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from msgspec import Struct
from msgspec.structs import replace

from leyden.client.attempt.leased import ActiveAttempt
from leyden.client.host_protocol import AttemptEnd
from leyden.client.retrying_client import RetryingClient
from leyden.client.runners.base import Runner
from leyden.client.runners.supervisor import RunnerSupervisor, TimeLimits
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.client.worker.concurrency import ConcurrencyLimit
from leyden.client.worker.heartbeat import Heartbeat
from leyden.client.worker.reporter import Reporter
from leyden.loading import LoadError
from leyden.outcomes import Ending, Outcome
from leyden.wire import Lease, LeaseRequest

_WAIT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_ALONE_AT_ONCE = 8
"""Processes with a single attempt: each costs as much memory as a host."""


class LeaseLoopOptions(Struct, frozen=True, kw_only=True):
    """What a lane is told."""

    worker: str
    run: str | None
    places: int
    limits: TimeLimits
    begin: Callable[[Lease | None], Awaitable[Runner]]
    """Start what runs its attempts, or only the one that is named."""


class LeaseLoop:
    """Leases as many attempts as it has free places, and sees each to its end. Its tasks live in the worker's group."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        contact: RetryingClient,
        jobs: Heartbeat,
        reporter: Reporter,
        services: ServiceRegistry,
        terms: LeaseLoopOptions,
    ) -> None:
        self._tasks, self._contact, self._jobs, self._reporter = tasks, contact, jobs, reporter
        self._services = services
        self._terms = terms
        self._places = ConcurrencyLimit(terms.places)
        self._alone = asyncio.Semaphore(_ALONE_AT_ONCE)
        self._scoring = asyncio.Semaphore(terms.places)
        self._turns = asyncio.Semaphore(terms.places)
        self._lent: tuple[str, ...] = ()
        self._station: RunnerSupervisor | None = None
        self._opened = asyncio.Event()
        self._working: set[asyncio.Task[None]] = set()
        self._leasing: asyncio.Task[None] | None = None
        self._asking = self._closing = False

    async def work(self) -> None:
        """Work until cancelled, over as many stations as it takes. Leases nothing before the agent was loaded once."""
        pause = _FIRST_PAUSE_S
        try:
            while True:
                station, _ = await self._open(None)
                self._station = station
                self._opened.set()
                if self._leasing is None and not self._closing:
                    self._lent = station.runner.services
                    self._turns = asyncio.Semaphore(min(self._terms.places, station.runner.at_once or sys.maxsize))
                    self._leasing = self._tasks.create_task(self._lease(station.runner.pool))
                await station.worn.wait()
                pause = _FIRST_PAUSE_S if station.fruitful else min(_LONGEST_PAUSE_S, 2 * pause)
                if not station.fruitful:
                    await asyncio.sleep(pause)
        finally:
            for task in (self._leasing, *self._working):
                if task is not None:
                    task.cancel()
            await asyncio.shield(asyncio.gather(*self._working, return_exceptions=True))

    async def stop_leasing(self, within_s: float) -> None:
        """Take no new work. What is leased meanwhile is given back, unless the server takes too long to say."""
        self._closing = True
        if self._leasing is not None:
            await asyncio.wait((self._leasing,), timeout=within_s if self._asking else 0)
            self._leasing.cancel()

    async def _lease(self, pool: str | None) -> None:
        """Keep the places filled."""
        while not self._closing:
            free = await self._places.take()
            leases: list[Lease] = []
            request = LeaseRequest(self._terms.worker, min(free, 1000), _WAIT_S, self._terms.run, pool)
            self._asking = True
            try:
                leases = await self._contact.insist(
                    lambda: self._contact.remote.lease(request),  # noqa: B023 - awaited here
                    within_s=_WAIT_S + 10,
                )
            finally:
                self._asking = False
                self._places.release(free - len(leases))
            for lease in leases:
                job = ActiveAttempt(lease)
                self._jobs.add(job)
                job.task = self._tasks.create_task(self._give_back(job) if self._closing else self._look_after(job))

    async def _give_back(self, job: ActiveAttempt) -> None:
        await self._reporter.give_back(job.lease)
        self._jobs.remove(job)

    async def _look_after(self, job: ActiveAttempt) -> None:
        """See an attempt to its end. Its place is free when it is reported and no burden to its station any more."""
        try:
            async with AsyncExitStack() as loan:
                lent = await loan.enter_async_context(self._services.lend(self._lent))
                if job.lease.alone:
                    async with self._alone:
                        await self._see_alone(job, lent, loan)
                else:
                    async with self._turns:
                        await self._see(job, await self._current(), lent, loan)
        except ServiceFailed as error:
            await self._report(job, AttemptEnd(job.id, Outcome(Ending.LOST, str(error))))
        finally:
            self._places.release()

    async def _see_alone(self, job: ActiveAttempt, lent: dict[str, str], loan: AsyncExitStack) -> None:
        try:
            station, working = await self._open(job.lease)
        except LoadError as error:  # though it could be loaded when this lane began
            await self._report(job, AttemptEnd(job.id, Outcome(Ending.LOST, str(error))))
            return
        await self._see(job, station, lent, loan)
        station.worn.set()
        await asyncio.shield(working)

    async def _see(
        self, job: ActiveAttempt, station: RunnerSupervisor, lent: dict[str, str], loan: AsyncExitStack
    ) -> None:
        ended = await station.see(job, lent)
        if self._reporter.scores(ended):  # its code has returned: its place is another's while it is scored
            await self._scoring.acquire()
            job.task = self._tasks.create_task(self._score(job, ended, lent, loan.pop_all()))
            return
        await self._report(job, ended)
        await station.leave(job)
        if lent and not job.left.is_set():  # its code may still use what it was lent
            self._tasks.create_task(self._return(job, loan.pop_all()))

    async def _score(
        self, job: ActiveAttempt, ended: AttemptEnd | None, lent: dict[str, str], loan: AsyncExitStack
    ) -> None:
        """Report an attempt that is scored first; what its agent was lent the reward function may want to see."""
        try:
            async with loan:
                if not any(map(self._reporter.uses, lent)):
                    await loan.aclose()
                await self._report(job, ended, lent)
        finally:
            self._scoring.release()

    async def _return(self, job: ActiveAttempt, loan: AsyncExitStack) -> None:
        async with loan:
            await job.left.wait()

    async def _report(self, job: ActiveAttempt, ended: AttemptEnd | None, lent: Mapping[str, str] = {}) -> None:
        if ended is not None:
            await self._reporter.report(job.lease, ended, tuple(job.rewards), lent)
            self._places.feel(self._contact.crowding)
        self._jobs.remove(job)

    async def _open(self, alone: Lease | None) -> tuple[RunnerSupervisor, asyncio.Task[None]]:
        runner = await self._terms.begin(alone)
        limits = self._terms.limits if alone is None else replace(self._terms.limits, drain_s=0.0)
        station = RunnerSupervisor(runner, limits, alone=alone is not None)
        working = self._tasks.create_task(station.work())
        self._working.add(working)
        working.add_done_callback(self._working.discard)
        return station, working

    async def _current(self) -> RunnerSupervisor:
        """The station that takes new work, as soon as there is one."""
        while self._station is None or self._station.worn.is_set():
            self._opened.clear()
            await self._opened.wait()
        return self._station
