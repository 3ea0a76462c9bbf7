"""Group commit: the operations of many callers share one transaction and one fsync.

Operations that arrive during a commit share the next transaction. An operation that raises a `StoreError` is rolled
back alone; on any other failure (a full disk, a lost connection, a bug) the whole transaction is rolled back and its
operations are tried one by one. An operation returns only after the commit that contains it. If the store is lost
(its files were deleted, another server has taken it over), this and every later operation is refused.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Generic, TypeVar

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from leyden.records import Event, EventKind
from leyden.store.codec import encode_json
from leyden.store.database import Database
from leyden.store.errors import StoreClosed, StoreError, StoreInUse, StoreLost, StoreUnavailable
from leyden.store.schema import events
from leyden.store.write.statements import Statement, insert

T = TypeVar("T")

_log = logging.getLogger("leyden.store")
_LARGEST_BATCH = 512


class Transaction:
    """Gives an operation a cursor, the current time and the event log."""

    def __init__(self, cursor: Any, dialect: str, now: float) -> None:
        self.cursor = cursor
        self.dialect = dialect
        self.now = now
        self.events: list[Event] = []
        self._seq = int(_LAST_EVENT.scalar(self) or 0)

    def emit(self, run: str, kind: EventKind, subject: str, /, **data: Any) -> None:
        """Append an event to a run's log; it is published after the commit."""
        self.events.append(Event(self._seq + len(self.events) + 1, run, kind, subject, self.now, data))

    def perform(self, operation: Callable[["Transaction"], T]) -> T:
        """Run an operation in a savepoint; one that raises `StoreError` is rolled back alone."""
        self.cursor.execute("SAVEPOINT operation")
        emitted = len(self.events)
        try:
            result = operation(self)
        except StoreError:
            self.cursor.execute("ROLLBACK TO SAVEPOINT operation")
            del self.events[emitted:]
            raise
        self.cursor.execute("RELEASE SAVEPOINT operation")
        return result

    def write_log(self) -> None:
        """Insert the emitted events."""
        _ADD_EVENT.run_many(
            self,
            (
                {"seq": e.seq, "run_id": e.run, "kind": e.kind.value, "subject": e.subject, "at": e.at, "data": data}
                for e, data in ((event, encode_json(event.data)) for event in self.events)
            ),
        )


_LAST_EVENT = Statement(select(func.max(events.c.seq)))
_ADD_EVENT = insert(events)


def _is_database_error(error: Exception) -> bool:
    """Whether the database failed, not the program: every driver's errors have a base class of this name."""
    return any(base.__name__ == "DatabaseError" for base in type(error).__mro__) or isinstance(error, SQLAlchemyError)


class _Operation(Generic[T]):
    """An operation and the future of its caller."""

    def __init__(self, operation: Callable[[Transaction], T], future: asyncio.Future[T]) -> None:
        self.operation = operation
        self.future = future
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self, transaction: Transaction) -> None:
        try:
            self.result = transaction.perform(self.operation)
        except StoreError as error:
            self.error = error

    def resolve(self) -> None:
        if self.future.done():  # the caller was cancelled; its operation is committed all the same
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]  # None only if T is


class Writer:
    """The thread that writes to the database; there is one per store."""

    def __init__(self, database: Database, clock: Callable[[], float], publish: Callable[[list[Event]], None]) -> None:
        self.commits = 0
        self.operations = 0
        self.busy_s = 0.0
        self.outages = 0
        """How often the database began to fail, for example because the disk was full."""
        self._failing = False
        self._database = database
        self._clock = clock
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[StoreLost] = self._loop.create_future()
        """Done when the store is no longer this process's."""
        self._closed = False
        self._jobs: SimpleQueue[_Operation[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="leyden-store", daemon=True)
        self._thread.start()

    async def run(self, operation: Callable[[Transaction], T]) -> T:
        """Run an operation in the next transaction; it is durable when this returns.

        Raises `StoreClosed` after `close`.
        """
        if self.lost.done():
            raise self.lost.result()
        if self._closed:
            raise StoreClosed("the store is closed")
        job: _Operation[T] = _Operation(operation, self._loop.create_future())
        self._jobs.put(job)
        return await job.future

    async def close(self) -> None:
        """Finish accepted operations and end the thread."""
        self._closed = True
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while batch := self._next_batch():
            started = perf_counter()
            try:
                log = self._commit(batch)
            except (StoreInUse, StoreLost) as error:  # no operation can change that
                log = self._refuse(batch, error)
            except Exception:
                log = self._commit_each(batch)
            self.commits += 1
            self.operations += len(batch)
            self.busy_s += perf_counter() - started
            self._loop.call_soon_threadsafe(self._resolve, batch, log)

    def _commit(self, batch: Sequence[_Operation[Any]]) -> list[Event]:
        with self._database.transaction() as cursor:
            transaction = Transaction(cursor, self._database.dialect, self._clock())
            for job in batch:
                job.run(transaction)
            transaction.write_log()
        if self._failing:
            self._failing = False
            _log.warning("the store commits again")
        return transaction.events

    def _commit_each(self, batch: Sequence[_Operation[Any]]) -> list[Event]:
        log: list[Event] = []
        for number, job in enumerate(batch):
            try:
                log += self._commit_alone(job)
            except (StoreInUse, StoreLost) as error:
                return log + self._refuse(batch[number:], error)
        return log

    def _commit_alone(self, job: _Operation[Any]) -> list[Event]:
        job.error = None
        try:
            return self._commit([job])
        except (StoreInUse, StoreLost):
            raise
        except Exception as error:
            if _is_database_error(error):
                self._report_outage(error)
                error = StoreUnavailable(f"the store could not commit: {error}")
            job.error = error
            return []

    def _refuse(self, batch: Sequence[_Operation[Any]], error: StoreInUse | StoreLost) -> list[Event]:
        """Refuse operations because the store is another server's, for now or for good."""
        refusal: StoreError = error
        if isinstance(error, StoreInUse):
            self._report_outage(error)
            refusal = StoreUnavailable(f"the store could not commit: {error}")
        for job in batch:
            job.error = refusal
        return []

    def _report_outage(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            self.outages += 1
            _log.error("the store cannot commit (%s): it refuses requests with 503 until it can", error)

    def _next_batch(self) -> list[_Operation[Any]]:
        batch: list[_Operation[Any]] = []
        while job := self._jobs.get():
            batch.append(job)
            if self._jobs.empty() or len(batch) == _LARGEST_BATCH:
                return batch
        self._jobs.put(None)  # closing: finish this batch, and see the end marker again
        return batch

    def _resolve(self, batch: list[_Operation[Any]], log: list[Event]) -> None:
        self._publish(log)  # before any caller continues, so that the key of a finished attempt is invalid
        for job in batch:
            job.resolve()
            if isinstance(job.error, StoreLost) and not self.lost.done():
                self.lost.set_result(job.error)


class Notifications:
    """Passes each committed event to its listeners, on the event loop, in the order of the log: nothing polls."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Event], None]] = []
        self._listeners: dict[str | None, dict[asyncio.Event, str]] = {}
        self.closed = False
        """Whether `close` was called."""

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Call a function for every event from now on."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Call a function no more."""
        self._subscribers.remove(subscriber)

    @contextmanager
    def listen(self, run: str | None, kind: str = "") -> Iterator[asyncio.Event]:
        """Yield an `asyncio.Event` that the next event of a run (or of any run) and kind (or any kind) sets.

        Listen first and query second, so that no event in between is missed.
        """
        woken = asyncio.Event()
        if self.closed:
            woken.set()
        listeners = self._listeners.setdefault(run, {})
        listeners[woken] = kind
        try:
            yield woken
        finally:
            del listeners[woken]
            if not listeners and self._listeners.get(run) is listeners:
                del self._listeners[run]

    def publish(self, events: Iterable[Event]) -> None:
        """Notify subscribers and listeners. A subscriber that fails is logged; the others are still notified."""
        for event in events:
            for subscriber in tuple(self._subscribers):
                try:
                    subscriber(event)
                except Exception:  # it must not keep the callers of a committed transaction waiting
                    _log.exception("a subscriber failed on the event %s of %s", event.kind, event.subject)
            for run in (event.run, None):
                for woken, kind in self._listeners.get(run, {}).items():
                    if kind in ("", event.kind):
                        woken.set()

    def close(self) -> None:
        """Wake all listeners, present and future."""
        self.closed = True
        for listeners in self._listeners.values():
            for woken in listeners:
                woken.set()
