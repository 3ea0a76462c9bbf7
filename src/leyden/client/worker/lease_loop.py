"""Leases attempts for one runner at a time and carries each from its lease to its report.

Leasing continues while one runner replaces another, so that no slot is idle meanwhile. An attempt whose earlier process
died gets its own runner: there it cannot take others down, and if that process dies too, it is at fault.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

from msgspec import Struct
from msgspec.structs import replace

from leyden.api.client import RemoteError, RetryingRemote
from leyden.api.wire import FinishRequest, Lease, LeaseRequest, TimeoutRequest
from leyden.backoff import Backoff
from leyden.client.attempt.active_attempt import ActiveAttempt
from leyden.client.runners.factory import Runner
from leyden.client.runners.supervisor import RunnerSupervisor
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.client.worker.heartbeat import Heartbeat
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.reporter import Reporter
from leyden.documentation import page
from leyden.outcomes import Ending, Outcome
from leyden.process.usage import UseReports
from leyden.user_code.loading import LoadError

LOOP_ERRORS = (
    "rollouts of a sync agent that ran at the same time used the same objects, such as a model client, in different "
    "event loops and failed. They are run again, and each process now runs one rollout at a time, which is slow. "
    "To run many, make the agent `async def` and await the framework's async call (`await Runner.run(...)` instead of "
    f"`Runner.run_sync(...)`), or run the agent as a command ({page('frameworks')})"
)
"""Logged once by a worker in which this happened."""
_log = logging.getLogger("leyden.worker")
_LONG_POLL_S = 30.0
_TIME_OUT_REPLY_S = 30.0
"""How long the code of an attempt may continue at its time limit while the server cannot be reached."""
_RESTART_BACKOFF = Backoff(first_s=0.2, max_s=5.0)
_MAX_ALONE = 8
"""Runners with a single attempt at the same time: each costs as much memory as a host process."""
_HIGH_PRESSURE, _LOW_PRESSURE = 1.0, 0.5
_DECREASE = 0.8


class ConcurrencyLimit:
    """A semaphore whose limit starts at `maximum` and follows the load of the engine.

    More rollouts than the engine can serve only wait, and their data grows stale. While more calls wait than are
    served, the limit falls by a fifth, at most once per as many finished attempts as the limit allows. While less than
    half as many wait, each finished attempt raises it by one. In between it stays. It is never below one.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = self.limit = maximum
        """How many slots may ever be in use, and how many now."""
        self._in_use = self._finished = 0
        self._changed = asyncio.Event()

    async def acquire_all(self) -> int:
        """Wait for a free slot, take every free slot and return their number."""
        while self._in_use >= self.limit:
            self._changed.clear()
            await self._changed.wait()
        free = self.limit - self._in_use
        self._in_use = self.limit
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
        if queue_pressure > _HIGH_PRESSURE and self._finished >= self.limit:
            self.limit, self._finished = max(1, int(_DECREASE * self.limit)), 0
        elif queue_pressure < _LOW_PRESSURE and self.limit < self._maximum:
            self.limit += 1
            self._changed.set()


class LeaseLoopOptions(Struct, frozen=True, kw_only=True):
    """Options of a lease loop."""

    worker: WorkerOptions
    concurrency: int
    start_runner: Callable[[Lease | None, bool], Awaitable[Runner]]
    """Starts a runner for any attempts, or for the single one that is given; with True, for one at a time."""
    one_at_a_time: asyncio.Event
    """Set when new runners of this worker are to run one attempt at a time."""
    use_reports: UseReports


class LeaseLoop:
    """Leases an attempt for each free slot and runs it. Its tasks belong to the worker's task group."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        client: RetryingRemote,
        heartbeat: Heartbeat,
        reporter: Reporter,
        services: ServiceRegistry,
        options: LeaseLoopOptions,
    ) -> None:
        self._tasks, self._client, self._heartbeat, self._reporter = tasks, client, heartbeat, reporter
        self._services = services
        self._options = options
        self._concurrency = ConcurrencyLimit(options.concurrency)
        self._alone_slots = asyncio.Semaphore(_MAX_ALONE)
        self._scoring_slots = asyncio.Semaphore(options.concurrency)
        self._service_names: tuple[str, ...] = ()
        self._supervisor: RunnerSupervisor | None = None
        self._supervisor_started = asyncio.Event()
        self._supervising: set[asyncio.Task[None]] = set()
        self._leasing: asyncio.Task[None] | None = None
        self._request_open = self._stopping = False

    async def run(self) -> None:
        """Run one supervised runner after another until cancelled. The first lease waits for the agent to load."""
        failures = 0
        try:
            while True:
                supervisor, _ = await self._start_supervisor(None)
                self._supervisor = supervisor
                self._supervisor_started.set()
                if self._leasing is None and not self._stopping:
                    self._service_names = supervisor.runner.services
                    self._leasing = self._tasks.create_task(self._lease(supervisor.runner.pool))
                await supervisor.retired.wait()
                if supervisor.has_loop_errors and not self._options.one_at_a_time.is_set():
                    self._options.one_at_a_time.set()
                    _log.warning(LOOP_ERRORS)
                failures = 0 if supervisor.any_returned else failures + 1
                if failures:
                    await _RESTART_BACKOFF.wait(failures)
        finally:
            for task in (self._leasing, *self._supervising):
                if task is not None:
                    task.cancel()
            await asyncio.shield(asyncio.gather(*self._supervising, return_exceptions=True))

    async def stop_leasing(self, timeout_s: float) -> None:
        """Lease nothing more. Attempts that an open request still brings within the timeout are given back."""
        self._stopping = True
        if self._leasing is not None:
            await asyncio.wait((self._leasing,), timeout=timeout_s if self._request_open else 0)
            self._leasing.cancel()

    async def _lease(self, pool: str | None) -> None:
        """Keep the slots filled."""
        worker = self._options.worker
        while not self._stopping:
            free = await self._concurrency.acquire_all()
            leases: list[Lease] = []
            count, use = min(free, 1000), self._options.use_reports.take()
            request = LeaseRequest(worker.name, count, _LONG_POLL_S, worker.run, pool, use)
            self._request_open = True
            try:
                leases = await self._client.limited(timeout_s=_LONG_POLL_S + 10).lease(request)
            finally:
                self._request_open = False
                self._concurrency.release(free - len(leases))
            for lease in leases:
                active = ActiveAttempt(lease)
                self._heartbeat.track(active)
                work = self._give_back(active) if self._stopping else self._run_attempt(active)
                active.task = self._tasks.create_task(work)

    async def _give_back(self, active: ActiveAttempt) -> None:
        await self._reporter.give_back(active.lease)
        self._heartbeat.untrack(active)

    async def _run_attempt(self, active: ActiveAttempt) -> None:
        """Run an attempt, score it and report it. Its slot is free when its code has returned or its runner retired."""
        try:
            async with AsyncExitStack() as acquired:
                services = await acquired.enter_async_context(self._services.acquire(self._service_names))
                active.lease = replace(active.lease, services=services)
                if active.lease.alone:
                    async with self._alone_slots:
                        await self._run_alone(active, acquired)
                else:
                    supervisor = await self._acquire_slot()
                    try:
                        await self._run_on(supervisor, active, acquired)
                    finally:
                        supervisor.slots.release()
        except ServiceFailed as error:
            await self._report(active, FinishRequest(Outcome(Ending.LOST, str(error))))
        finally:
            self._concurrency.release()

    async def _run_alone(self, active: ActiveAttempt, acquired: AsyncExitStack) -> None:
        """Run an attempt in its own runner."""
        try:
            supervisor, supervising = await self._start_supervisor(active.lease)
        except LoadError as error:  # although the loop's first runner could load the agent
            await self._report(active, FinishRequest(Outcome(Ending.LOST, str(error))))
            return
        await self._run_on(supervisor, active, acquired)
        supervisor.retired.set()
        await asyncio.shield(supervising)

    async def _run_on(self, supervisor: RunnerSupervisor, active: ActiveAttempt, acquired: AsyncExitStack) -> None:
        end = await supervisor.run_attempt(active)
        if self._reporter.needs_scoring(end):  # its code has returned: scoring does not occupy a runner slot
            await self._scoring_slots.acquire()
            active.task = self._tasks.create_task(self._score(active, end, acquired.pop_all()))
            return
        await self._report(active, end)
        await supervisor.wait_released(active)
        if active.lease.services and not active.released.is_set():  # its code may still use what it has acquired
            self._tasks.create_task(self._return_when_released(active, acquired.pop_all()))

    async def _score(self, active: ActiveAttempt, end: FinishRequest | None, acquired: AsyncExitStack) -> None:
        """Score and report an attempt. Its services are returned first, unless the reward function uses one of them."""
        try:
            async with acquired:
                if not any(map(self._reporter.reward_uses, active.lease.services)):
                    await acquired.aclose()
                await self._report(active, end)
        finally:
            self._scoring_slots.release()

    async def _return_when_released(self, active: ActiveAttempt, acquired: AsyncExitStack) -> None:
        async with acquired:
            await active.released.wait()

    async def _report(self, active: ActiveAttempt, end: FinishRequest | None) -> None:
        if end is not None:
            await self._reporter.report(active.lease, end, tuple(active.step_rewards))
            self._concurrency.adjust(self._reporter.queue_pressure)
        self._heartbeat.untrack(active)

    async def _time_out(self, lease: Lease, ran_s: float) -> float:
        """Ask the server how much time an attempt has left; none if the server does not know it or is down."""
        request = TimeoutRequest(ran_s, self._options.worker.rollout.time_limit_s)
        with suppress(TimeoutError, RemoteError):
            async with asyncio.timeout(_TIME_OUT_REPLY_S):
                reply = await self._client.time_out(lease.run, lease.id, request)
                return reply.left_s
        return 0.0

    async def _start_supervisor(self, alone: Lease | None) -> tuple[RunnerSupervisor, asyncio.Task[None]]:
        one_at_a_time = alone is not None or self._options.one_at_a_time.is_set()
        runner = await self._options.start_runner(alone, one_at_a_time)
        slots = 1 if one_at_a_time else min(self._options.concurrency, runner.max_concurrency or sys.maxsize)
        supervisor = RunnerSupervisor(
            runner, self._options.worker, self._time_out, slots=slots, alone=alone is not None
        )
        supervising = self._tasks.create_task(supervisor.run())
        self._supervising.add(supervising)
        supervising.add_done_callback(self._supervising.discard)
        return supervisor, supervising

    async def _acquire_slot(self) -> RunnerSupervisor:
        """Wait for a slot of the runner that takes new attempts, and return its supervisor."""
        while True:
            supervisor = await self._current_supervisor()
            await supervisor.slots.acquire()
            if not supervisor.retired.is_set():
                return supervisor
            supervisor.slots.release()

    async def _current_supervisor(self) -> RunnerSupervisor:
        """Return the supervisor that takes new attempts; wait until there is one."""
        while self._supervisor is None or self._supervisor.retired.is_set():
            self._supervisor_started.clear()
            await self._supervisor_started.wait()
        return self._supervisor
