"""What happened, durably: SQLite by default, PostgreSQL by URL.

A method that has returned has committed. The operations themselves are functions over a transaction (`runs`, `queue`,
`attempts`, `scoring`, `recording`) or over a reading connection (`queries`); this class gives them a writer thread,
readers, notifications and a clock.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, select

from leyden.background import start_background
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Event, EventKind, Group, Metric, Reward, Run, Span, Version
from leyden.store import attempts, queries, queue, recording, runs, schema, scoring
from leyden.store.database import Database
from leyden.store.lease_dispatcher import LeaseDispatcher
from leyden.store.notifications import Notifications
from leyden.store.queue import LeasedAttempt, LeaseQuery
from leyden.store.writer import Transaction, Writer
from leyden.wire import (
    Counted,
    EventCursor,
    EventLog,
    FinishReply,
    FinishRequest,
    GroupScoring,
    GroupSpec,
    HeartbeatReply,
    RunSpec,
    Scores,
)

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 2
_log = logging.getLogger("leyden.store")


class Store:
    """A store that is open for writing, in a running event loop."""

    def __init__(self, location: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.database = Database(location)
        self.clock = clock
        self.changes = Notifications()
        self.writer = Writer(self.database, clock, self.changes.publish)
        self._readers = ThreadPoolExecutor(_READERS, "leyden-reader")
        self._desk = LeaseDispatcher(self._lease, self._give_up, clock)
        self.changes.subscribe(self._desk.hear)
        self._deletions: set[asyncio.Task[None]] = set()

    async def start(self) -> Self:
        """Take up what an earlier process left: live leases get their full length, half-made deletions go on."""
        await self.writer.run(attempts.grace)
        await self.writer.run(scoring.grace)
        for run, moment in await self.read(queries.delayed, self.clock()):
            self._desk.expect(run, moment)
        hidden = select(schema.runs.c.id).where(schema.runs.c.state == "deleting")
        for run in await self.read(lambda connection: connection.scalars(hidden).all()):
            self._delete_rest(run)
        return self

    def stop_waiting(self) -> None:
        """Let everybody go who waits for work or news."""
        self._desk.stop_waiting()
        self.changes.close()

    async def close(self) -> None:
        """Finish what was accepted, and close the database."""
        self.stop_waiting()
        for task in self._deletions:
            task.cancel()
        await asyncio.gather(*self._deletions, return_exceptions=True)
        await self._desk.close()
        await self.writer.close()
        self._readers.shutdown()
        self.database.close()

    # What is asked of it

    async def read(self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Answer a question (a function of `queries`) from one consistent look."""

        def look() -> T:
            with self.database.reader.begin() as connection:
                return question(connection, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._readers, look)

    async def events(self, run: str, cursor: EventCursor) -> EventLog:
        """A run's events after a cursor; where there are none yet, wait for one."""
        ask = partial(queries.log, run=run, after=cursor.after, kind=cursor.kind, limit=cursor.limit)
        deadline = time.monotonic() + cursor.wait
        while True:
            with self.changes.listen(run, cursor.kind) as woken:
                found = await self.read(ask)
                left = deadline - time.monotonic()
                if found or left <= 0 or self.changes.closed:
                    return EventLog(tuple(found), found[-1].seq if found else cursor.after)
                try:
                    async with asyncio.timeout(left):  # wait_for would lose a cancellation that comes with the event
                        await woken.wait()
                except TimeoutError:
                    deadline = 0.0

    # What is done to it

    async def _write(self, operation: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.writer.run(lambda tx: operation(tx, *args, **kwargs))

    async def create_run(self, spec: RunSpec) -> Run:
        """Create a run, idempotently."""
        return await self._write(runs.create_run, spec)

    async def delete_run(self, run: str) -> None:
        """Hide a run at once and free its space; returns when it is gone."""
        await self._write(runs.begin_delete, run)
        await asyncio.shield(self._delete_rest(run))

    async def enqueue(self, run: str, spec: GroupSpec) -> Group:
        """Queue a group of rollouts, idempotently."""
        return await self._write(queue.enqueue, run, spec)

    async def lease(self, want: LeaseQuery, wait: float = 0.0) -> list[LeasedAttempt]:
        """Lease rollouts; where there are none, wait for some."""
        return await self._desk.ask(want, wait)

    def withdraw(self, worker: str) -> None:
        """Answer at once what a worker has asked for: it is about to stop."""
        self._desk.withdraw(worker)

    async def beat(self, worker: str, ids: Sequence[str], run: str | None = None) -> HeartbeatReply:
        """Prolong leases."""
        return await self._write(attempts.beat, worker, ids, run)

    async def expire(self) -> int:
        """End attempts and scorings whose lease has run out."""
        return await self._write(attempts.expire) + await self._write(scoring.expire)

    async def finish(self, run: str, attempt: str, report: FinishRequest) -> FinishReply:
        """End an attempt, exactly once."""
        return await self._write(attempts.finish, run, attempt, report)

    async def release(self, why: str) -> int:
        """End every live attempt, uncharged, where whoever was at them is known to be gone."""
        alive = await self.read(queries.alive)
        for live in alive:
            await self._write(attempts.uncharge, live.attempt, Outcome(Ending.LOST, why))
        await self._write(scoring.release)
        return len(alive)

    async def lease_scoring(self, worker: str, run: str | None, wait: float = 0.0) -> GroupScoring | None:
        """Lease a group to score; where there is none, wait for one."""
        deadline = time.monotonic() + wait
        while True:
            with self.changes.listen(run, EventKind.SCORING_QUEUED) as woken:
                leasing = asyncio.ensure_future(self._write(scoring.lease, worker, run))
                try:
                    found = await asyncio.shield(leasing)
                except asyncio.CancelledError:  # leased, it may be, to a worker that has hung up
                    if (found := await leasing) is not None:
                        await self.score(found.group.run, found.group.id, Scores(found.number, given_back=True))
                    raise
                left = deadline - time.monotonic()
                if found or left <= 0 or self.changes.closed:
                    return found
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):  # wait_for would lose a cancellation that comes with the news
                        await woken.wait()

    async def beat_scoring(self, run: str, group: str, number: int) -> Counted:
        """Prolong the lease of a scoring."""
        return await self._write(scoring.beat, run, group, number)

    async def score(self, run: str, group: str, scores: Scores) -> Counted:
        """Take the scores of a group, once."""
        return await self._write(scoring.finish, run, group, scores)

    async def cancel_group(self, run: str, group: str) -> int:
        """Cancel what is unfinished of a group."""
        return await self._write(attempts.cancel_group, run, group)

    async def cancel_rollout(self, run: str, rollout: str) -> int:
        """Cancel a rollout."""
        return await self._write(attempts.cancel_rollout, run, rollout)

    async def record_calls(self, run: str, attempt: str, calls: Sequence[Call]) -> int:
        """Record model calls."""
        return await self._write(recording.record_calls, run, attempt, calls)

    async def record_spans(self, run: str, attempt: str, spans: Sequence[Span]) -> int:
        """Record spans."""
        return await self._write(recording.record_spans, run, attempt, spans)

    async def record_rewards(
        self, run: str, attempt: str, rewards: Sequence[Reward], *, rescoring: bool = False
    ) -> int:
        """Record rewards."""
        return await self._write(recording.record_rewards, run, attempt, rewards, rescoring=rescoring)

    async def record_metrics(self, run: str, metrics: Sequence[Metric]) -> int:
        """Record numbers of a run."""
        return await self._write(recording.record_metrics, run, metrics)

    async def publish_version(self, run: str, version: Version) -> int:
        """Record a published version."""
        return await self._write(recording.publish_version, run, version)

    async def sweep(self) -> None:
        """End leases as they run out, for as long as the store is open; sleeps until the next one may."""
        planned: float | None = None
        sooner = asyncio.Event()

        def hear(event: Event) -> None:
            begins = event.kind in (EventKind.ATTEMPT_STARTED, EventKind.SCORING_STARTED)
            if begins and (planned is None or event.data["expires"] < planned):
                sooner.set()

        self.changes.subscribe(hear)
        while True:
            sooner.clear()
            try:
                planned = await self.read(queries.next_expiry)
                if planned is not None and planned <= self.clock():
                    await self.expire()
                    continue
            except Exception as error:  # expiry must not end with a disk that was full for a while
                _log.warning("leases could not be looked after: %s", error)
                planned = self.clock() + 1.0
            with suppress(TimeoutError):
                async with asyncio.timeout(planned and planned - self.clock()):
                    await sooner.wait()

    async def _lease(self, wants: Sequence[LeaseQuery]) -> list[list[LeasedAttempt]]:
        return await self._write(queue.lease, wants)

    async def _give_up(self, grant: LeasedAttempt) -> None:
        outcome = Outcome(Ending.LOST, f"worker {grant.attempt.worker} hung up before its lease reached it")
        await self._write(attempts.uncharge, grant.attempt.id, outcome)

    def _delete_rest(self, run: str) -> asyncio.Task[None]:
        async def delete() -> None:
            while not await self._write(runs.delete_piece, run):
                pass
            while await asyncio.to_thread(self.database.shrink):
                pass

        task = start_background(delete(), f"deleting run {run}")
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)
        return task
