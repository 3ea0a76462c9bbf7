"""The store: asynchronous methods over a SQLite or PostgreSQL database.

A method that has returned has committed. The operations are functions of a transaction (`runs`, `queue`, `attempts`,
`scoring`, `recording`) or of a reading connection (`queries`); this class gives them a writer thread, reader threads,
notifications and a clock.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, select

from leyden.api.wire import EventCursor, EventLog, GroupScoring, Lease, LeaseRequest, Scores
from leyden.background import start_background, wait_set
from leyden.outcomes import Ending, Outcome
from leyden.records import EventKind
from leyden.store import schema
from leyden.store.database import Database
from leyden.store.errors import StoreError, StoreLost
from leyden.store.read import queries
from leyden.store.write import attempts, queue, recording, runs, scoring
from leyden.store.write.lease_dispatcher import LeaseDispatcher
from leyden.store.write.lease_expiry import LeaseExpiry
from leyden.store.write.writer import Notifications, Transaction, Writer

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 2
_WATCH_S = 2.0


def _writing(
    operation: Callable[Concatenate[Transaction, P], T],
) -> Callable[Concatenate["Store", P], Coroutine[Any, Any, T]]:
    """Return a method of the store that carries out an operation in a write transaction."""

    async def write(store: "Store", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await store.write(operation, *args, **kwargs)

    return write


class Store:
    """A store that is open for writing, in a running event loop."""

    def __init__(self, location: str | Path, clock: Callable[[], float] = time.time, *, create: bool = True) -> None:
        self.database = Database(location, create=create)
        self.clock = clock
        self.notifications = Notifications()
        self.writer = Writer(self.database, clock, self.notifications.publish)
        self._readers = ThreadPoolExecutor(_READERS, "leyden-reader")
        self._dispatcher = LeaseDispatcher(self._lease, self._return_lease, clock)
        self.notifications.subscribe(self._dispatcher.on_event)
        self._deletions: set[asyncio.Task[None]] = set()

    @property
    def lost(self) -> asyncio.Future[StoreLost]:
        """Done when the store is no longer this process's; then it acknowledges nothing."""
        return self.writer.lost

    async def start(self) -> Self:
        """Recover the state of an earlier process: renew active leases in full and continue unfinished deletions.

        A store that cannot is closed.
        """
        try:
            await self.renew_leases()
            for run, moment in await self.read(queries.delayed_retries, self.clock()):
                self._dispatcher.schedule(run, moment)
            hidden = select(schema.runs.c.id).where(schema.runs.c.state == "deleting")
            for run in await self.read(lambda connection: connection.scalars(hidden).all()):
                self._delete_rows(run)
        except BaseException:
            await self.close()
            raise
        return self

    def stop_waiting(self) -> None:
        """Answer at once all requests that wait for work or events."""
        self._dispatcher.stop_waiting()
        self.notifications.close()

    async def close(self) -> None:
        """Finish accepted operations and close the database."""
        self.stop_waiting()
        for task in self._deletions:
            task.cancel()
        await asyncio.gather(*self._deletions, return_exceptions=True)
        await self._dispatcher.close()
        await self.writer.close()
        self._readers.shutdown()
        self.database.close()

    # Reading

    async def read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query (a function of `queries`) in one read transaction."""

        def run() -> T:
            with self.database.reader.begin() as connection:
                return query(connection, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._readers, run)

    async def events(self, run: str, cursor: EventCursor) -> EventLog:
        """Return a run's events after a cursor; if there are none yet, wait for one."""
        query = partial(queries.list_events, run=run, after=cursor.after, kind=cursor.kind, limit=cursor.limit)
        deadline = time.monotonic() + cursor.wait
        while True:
            with self.notifications.listen(run, cursor.kind) as woken:
                found = await self.read(query)
                left = deadline - time.monotonic()
                if found or left <= 0 or self.notifications.closed:
                    return EventLog(tuple(found), found[-1].seq if found else cursor.after)
                await wait_set(woken, left)

    # Writing

    async def write(self, operation: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation (a function of `store/write`) in one write transaction."""
        return await self.writer.run(lambda tx: operation(tx, *args, **kwargs))

    create_run = _writing(runs.create_run)
    enqueue = _writing(queue.enqueue)
    park = _writing(attempts.park)
    cancel_group = _writing(attempts.cancel_group)
    cancel_rollout = _writing(attempts.cancel_rollout)
    heartbeat = _writing(attempts.heartbeat)
    finish = _writing(attempts.finish)
    heartbeat_scoring = _writing(scoring.heartbeat)
    score = _writing(scoring.finish)
    record_calls = _writing(recording.record_calls)
    record_divergence = _writing(recording.record_divergence)
    record_spans = _writing(recording.record_spans)
    record_rewards = _writing(recording.record_rewards)
    record_credits = _writing(recording.record_credits)
    record_metrics = _writing(recording.record_metrics)
    publish_version = _writing(recording.publish_version)
    delete_response = _writing(recording.delete_response)

    async def delete_run(self, run: str) -> None:
        """Hide a run at once and delete it; returns when its space is freed."""
        await self.write(runs.begin_delete, run)
        await asyncio.shield(self._delete_rows(run))

    async def prune(self, run: str, step: int, *, output: bool, spans: bool) -> None:
        """Delete output and spans of the attempts of a run up to a step; returns when their space is freed."""
        for wanted, prune_some in ((output, runs.prune_output), (spans, runs.prune_spans)):
            while wanted and await self.write(prune_some, run, step):
                pass
        while await asyncio.to_thread(self.database.shrink):
            pass

    async def lease(self, request: LeaseRequest) -> list[Lease]:
        """Lease rollouts; if there are none, wait for some. The server adds keys and its address to the leases."""
        return await self._dispatcher.lease(request)

    def withdraw(self, worker: str | None = None, run: str | None = None) -> None:
        """Answer waiting requests at once: those of a worker that is about to stop, or for a run that is done."""
        self._dispatcher.withdraw(worker, run)

    async def next_expiry(self) -> float | None:
        """Return when the next lease of an attempt or a group scoring expires."""
        return await self.read(queries.next_expiry)

    async def expire_leases(self, before: float | None = None) -> int:
        """End attempts and group scorings whose lease expired before a time, by default now."""
        before = self.clock() if before is None else before
        return await self.write(attempts.expire_leases, before) + await self.write(scoring.expire_leases, before)

    async def renew_leases(self) -> None:
        """Give every active lease its full time: workers could not renew it."""
        await self.write(attempts.renew_all)
        await self.write(scoring.renew_all)

    async def release_all(self, message: str) -> int:
        """End every active attempt without charging it, when the workers that ran them are known to be gone."""
        active = await self.read(queries.active_attempts)
        for attempt in active:
            await self.write(attempts.release, attempt.id, Outcome(Ending.LOST, message))
        await self.write(scoring.release_all)
        return len(active)

    async def lease_scoring(self, worker: str, run: str | None, wait: float = 0.0) -> GroupScoring | None:
        """Lease a group for scoring; if there is none, wait for one."""
        deadline = time.monotonic() + wait
        while True:
            with self.notifications.listen(run, EventKind.SCORING_QUEUED) as woken:
                leasing = asyncio.ensure_future(self.write(scoring.lease, worker, run))
                try:
                    found = await asyncio.shield(leasing)
                except asyncio.CancelledError:  # it may have been leased to a worker that has disconnected
                    if (found := await leasing) is not None:
                        await self.score(found.group.run, found.group.id, Scores(found.number, given_back=True))
                    raise
                left = deadline - time.monotonic()
                if found or left <= 0 or self.notifications.closed:
                    return found
                await wait_set(woken, left)

    async def expire_loop(self) -> None:
        """End leases as they expire, for as long as the store is open; see `LeaseExpiry`."""
        expiry = LeaseExpiry(self, self.clock, lambda: self.writer.outages)
        self.notifications.subscribe(expiry.on_event)
        await expiry.run()

    async def watch(self) -> None:
        """Notice within seconds that the store was lost, also if nothing is written; runs until then."""
        while not self.lost.done():
            await asyncio.sleep(_WATCH_S)
            with suppress(StoreError):  # the next operation says so too
                await self.write(lambda _: None)

    async def _lease(self, requests: Sequence[LeaseRequest]) -> list[list[Lease]]:
        return await self.write(queue.lease, requests)

    async def _return_lease(self, leased: Lease) -> None:
        outcome = Outcome(Ending.LOST, f"worker {leased.attempt.worker} disconnected before it received its lease")
        await self.write(attempts.release, leased.attempt.id, outcome)

    def _delete_rows(self, run: str) -> asyncio.Task[None]:
        async def delete() -> None:
            while not await self.write(runs.delete_batch, run):
                pass
            while await asyncio.to_thread(self.database.shrink):
                pass

        task = start_background(delete(), f"deleting run {run}")
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)
        return task
