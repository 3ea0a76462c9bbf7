"""Matching workers that wait with work that arrives.

All requests for work pass through one desk, which serves many with one operation on the store: each when it comes, and
again only when there is new work for it. A thousand idle workers cost nothing.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice

from leyden.background import start_background
from leyden.records import Event, EventKind
from leyden.store.queue import LeasedAttempt, LeaseQuery

_log = logging.getLogger("leyden.store")


class _WaitingWorker:
    """A worker at the desk."""

    def __init__(self, want: LeaseQuery, number: int, patient: bool) -> None:
        self.want = want
        self.number = number
        self.patient = patient
        self.granted: asyncio.Future[list[LeasedAttempt]] = asyncio.get_running_loop().create_future()

    def dismiss(self) -> None:
        """Send it away with nothing."""
        if not self.granted.done():
            self.granted.set_result([])


class LeaseDispatcher:
    """The desk. `lease` is the store's operation; `give_up` takes a grant back that nobody is there to receive."""

    def __init__(
        self,
        lease: Callable[[Sequence[LeaseQuery]], Awaitable[list[list[LeasedAttempt]]]],
        give_up: Callable[[LeasedAttempt], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lease = lease
        self._give_up = give_up
        self._clock = clock
        self._came = 0
        self._new: list[_WaitingWorker] = []
        self._waiting: dict[str | None, dict[_WaitingWorker, None]] = {}  # by the run they want, in the order they came
        self._new_work: Counter[str] = Counter()
        self._served: set[_WaitingWorker] = set()
        self._patience = True
        self._bell = asyncio.Event()
        self._task = start_background(self._serve(), "the lease dispatcher")

    async def ask(self, want: LeaseQuery, wait: float) -> list[LeasedAttempt]:
        """Wait for work, `wait` seconds at the most; an empty list where there was none."""
        wait = wait if self._patience else 0.0
        self._came += 1
        waiting = _WaitingWorker(want, self._came, patient=wait > 0)
        self._new.append(waiting)
        queue = self._waiting.setdefault(want.run, {})
        queue[waiting] = None
        self._bell.set()
        timer = asyncio.get_running_loop().call_later(wait, self._time_out, waiting)
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            if not waiting.granted.cancelled():  # granted, and gone before it heard of it
                await asyncio.shield(self._take_back(waiting.granted.result()))
            raise
        finally:
            timer.cancel()
            del queue[waiting]
            if not queue and self._waiting.get(want.run) is queue:
                del self._waiting[want.run]

    def hear(self, event: Event) -> None:
        """Learn of new work."""
        if event.kind is EventKind.GROUP_QUEUED:
            self._new_work[event.run] += event.data["size"]
            self._bell.set()
        elif event.kind is EventKind.ROLLOUT_QUEUED:
            self.expect(event.run, event.data["not_before"])

    def expect(self, run: str, moment: float) -> None:
        """Count on a piece of work that can be had from a moment on."""
        left = moment - self._clock()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self.expect, run, moment)  # timers may be a little early
            return
        self._new_work[run] += 1
        self._bell.set()

    def withdraw(self, worker: str) -> None:
        """A worker wants no more work: what it has asked for is answered now, with what was just granted or nothing."""
        for queue in self._waiting.values():
            for waiting in queue:
                if waiting.want.worker == worker:
                    self._time_out(waiting)

    def stop_waiting(self) -> None:
        """Send everybody away who only waits; who is being served still is."""
        self._patience = False
        for queue in self._waiting.values():
            for waiting in queue:
                self._time_out(waiting)

    async def close(self) -> None:
        """Close the desk; there must be nobody left to serve."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _time_out(self, waiting: _WaitingWorker) -> None:
        waiting.patient = False
        if waiting not in self._new and waiting not in self._served:
            waiting.dismiss()

    async def _serve(self) -> None:
        while True:
            self._served = set()
            await self._bell.wait()
            self._bell.clear()
            batch = sorted(self._next(), key=lambda waiting: waiting.number)
            if not batch:
                continue
            self._served = set(batch)
            try:
                granted = await self._lease([waiting.want for waiting in batch])
            except Exception as error:
                for waiting in batch:
                    if not waiting.granted.done():
                        waiting.granted.set_exception(error)
                continue
            for waiting, grants in zip(batch, granted, strict=True):
                if waiting.granted.done():  # it went away meanwhile
                    await self._take_back(grants)
                elif grants:
                    waiting.granted.set_result(grants)
                elif not waiting.patient:
                    waiting.dismiss()

    async def _take_back(self, grants: list[LeasedAttempt]) -> None:
        for grant in grants:
            try:
                await self._give_up(grant)
            except Exception as error:  # then its lease will run out
                _log.warning("attempt %s was leased to nobody: %s", grant.attempt.id, error)

    def _next(self) -> set[_WaitingWorker]:
        """Who is new, and who may have hopes of the new work: as many as there are pieces, the first that came."""
        batch = {waiting for waiting in self._new if not waiting.granted.done()}
        self._new = []
        for run, pieces in self._new_work.items():
            for queue in (self._waiting.get(None, {}), self._waiting.get(run, {})):
                batch.update(islice(_open(queue), pieces))
        self._new_work.clear()
        return batch


def _open(queue: dict[_WaitingWorker, None]) -> Iterator[_WaitingWorker]:
    return (waiting for waiting in queue if not waiting.granted.done())
