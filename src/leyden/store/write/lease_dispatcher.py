"""Matches workers that wait for leases with rollouts that are queued.

All lease requests pass through one dispatcher, which serves many with one store operation: each when it arrives, and
again only when there is new work for it. Idle workers cause no database load.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from leyden.api.wire import Lease, LeaseRequest
from leyden.background import start_background
from leyden.records import Event, EventKind

_log = logging.getLogger("leyden.store")


class _OpenRequest:
    """A lease request that has not been answered."""

    def __init__(self, wanted: LeaseRequest, may_wait: bool) -> None:
        self.wanted = wanted
        self.may_wait = may_wait
        self.waits = False
        """Whether it waits for new work; otherwise it is new, or is being served."""
        self.leased: asyncio.Future[list[Lease]] = asyncio.get_running_loop().create_future()

    def answer_empty(self) -> None:
        """Answer without a lease, unless the request was answered already."""
        if not self.leased.done():
            self.leased.set_result([])


class LeaseDispatcher:
    """Answers lease requests, the oldest first.

    `lease` is the store's operation; `return_lease` undoes a lease whose worker disconnected before receiving it.
    """

    def __init__(
        self,
        lease: Callable[[Sequence[LeaseRequest]], Awaitable[list[list[Lease]]]],
        return_lease: Callable[[Lease], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lease = lease
        self._return_lease = return_lease
        self._clock = clock
        self._open: dict[_OpenRequest, None] = {}  # in the order of arrival
        self._new: list[_OpenRequest] = []
        self._new_work: Counter[str] = Counter()
        self._accepts_waiting = True
        self._wakeup = asyncio.Event()
        self._task = start_background(self._serve(), "the lease dispatcher")

    async def lease(self, wanted: LeaseRequest) -> list[Lease]:
        """Lease rollouts; if there are none, wait for some as long as the request says, then return an empty list."""
        wait = wanted.wait if self._accepts_waiting else 0.0
        request = _OpenRequest(wanted, may_wait=wait > 0)
        self._open[request] = None
        self._new.append(request)
        self._wakeup.set()
        timer = asyncio.get_running_loop().call_later(wait, self._time_out, request)
        try:
            return await request.leased
        except asyncio.CancelledError:
            leased = request.leased
            if not leased.cancelled() and leased.exception() is None:  # leased, but the worker has disconnected
                await asyncio.shield(self._return_all(leased.result()))
            raise
        finally:
            timer.cancel()
            del self._open[request]

    def on_event(self, event: Event) -> None:
        """Count queued rollouts as new work."""
        if event.kind is EventKind.GROUP_QUEUED:
            self._new_work[event.run] += event.data["size"]
            self._wakeup.set()
        elif event.kind is EventKind.ROLLOUT_QUEUED:
            self.schedule(event.run, event.data["not_before"])

    def schedule(self, run: str, not_before: float) -> None:
        """Count a rollout as new work as soon as it can be leased."""
        left = not_before - self._clock()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self.schedule, run, not_before)  # timers may be a little early
            return
        self._new_work[run] += 1
        self._wakeup.set()

    def withdraw(self, worker: str | None = None, run: str | None = None) -> None:
        """Answer the waiting requests of a worker or for a run now, with the leases being made for them or none."""
        for request in self._open:
            if worker == request.wanted.worker or (run is not None and run == request.wanted.run):
                self._time_out(request)

    def stop_waiting(self) -> None:
        """Answer all waiting requests now, and accept no more waiting; requests in service are completed."""
        self._accepts_waiting = False
        for request in self._open:
            self._time_out(request)

    async def close(self) -> None:
        """Stop; no request may be left."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _time_out(self, request: _OpenRequest) -> None:
        request.may_wait = False
        if request.waits:
            request.answer_empty()

    async def _serve(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            batch = self._next_batch()
            if not batch:
                continue
            try:
                leased = await self._lease([request.wanted for request in batch])
            except Exception as error:
                for request in batch:
                    if not request.leased.done():
                        request.leased.set_exception(error)
                continue
            for request, attempts in zip(batch, leased, strict=True):
                if request.leased.done():  # its worker disconnected in the meantime
                    await self._return_all(attempts)
                elif attempts:
                    request.leased.set_result(attempts)
                elif request.may_wait:
                    request.waits = True
                else:
                    request.answer_empty()

    async def _return_all(self, leased: list[Lease]) -> None:
        for one in leased:
            try:
                await self._return_lease(one)
            except Exception as error:  # then its lease will expire
                _log.warning("attempt %s was leased to a worker that is gone: %s", one.attempt.id, error)

    def _next_batch(self) -> list[_OpenRequest]:
        """Return the new requests, and of those that wait, which are older, as many as there are new rollouts."""
        batch: list[_OpenRequest] = []
        left: Counter[str | None] = Counter(self._new_work)
        left[None] = left.total()  # for those who take rollouts of any run
        self._new_work.clear()
        for request in self._open if left.total() else ():
            run = request.wanted.run
            if request.waits and left[run] and not request.leased.done():
                left[run] -= 1
                request.waits = False
                batch.append(request)
        new, self._new = self._new, []
        return batch + [request for request in new if not request.leased.done()]
