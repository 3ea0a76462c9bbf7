"""Matches workers that wait for leases with rollouts that are queued.

All lease requests pass through one dispatcher, which serves many with one store operation: each when it arrives, and
again only when there is new work for it. Idle workers cause no database load.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice

from leyden.api.wire import Lease, LeaseRequest
from leyden.background import start_background
from leyden.records import Event, EventKind

_log = logging.getLogger("leyden.store")


class _WaitingRequest:
    """A lease request that has not been answered."""

    def __init__(self, wanted: LeaseRequest, number: int, may_wait: bool) -> None:
        self.wanted = wanted
        self.number = number
        self.may_wait = may_wait
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
        self._arrived = 0
        self._new: list[_WaitingRequest] = []
        self._waiting: dict[str | None, dict[_WaitingRequest, None]] = {}  # by run, in the order of arrival
        self._new_work: Counter[str] = Counter()
        self._in_service: set[_WaitingRequest] = set()
        self._accepts_waiting = True
        self._wakeup = asyncio.Event()
        self._task = start_background(self._serve(), "the lease dispatcher")

    async def lease(self, wanted: LeaseRequest) -> list[Lease]:
        """Lease rollouts; if there are none, wait for some as long as the request says, then return an empty list."""
        wait = wanted.wait if self._accepts_waiting else 0.0
        self._arrived += 1
        request = _WaitingRequest(wanted, self._arrived, may_wait=wait > 0)
        self._new.append(request)
        queue = self._waiting.setdefault(wanted.run, {})
        queue[request] = None
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
            del queue[request]
            if not queue and self._waiting.get(wanted.run) is queue:
                del self._waiting[wanted.run]

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
        for queue in self._waiting.values():
            for request in queue:
                if worker == request.wanted.worker or (run is not None and run == request.wanted.run):
                    self._time_out(request)

    def stop_waiting(self) -> None:
        """Answer all waiting requests now, and accept no more waiting; requests in service are completed."""
        self._accepts_waiting = False
        for queue in self._waiting.values():
            for request in queue:
                self._time_out(request)

    async def close(self) -> None:
        """Stop; no request may be left."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _time_out(self, request: _WaitingRequest) -> None:
        request.may_wait = False
        if request not in self._new and request not in self._in_service:
            request.answer_empty()

    async def _serve(self) -> None:
        while True:
            self._in_service = set()
            await self._wakeup.wait()
            self._wakeup.clear()
            batch = sorted(self._next_batch(), key=lambda request: request.number)
            if not batch:
                continue
            self._in_service = set(batch)
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
                elif not request.may_wait:
                    request.answer_empty()

    async def _return_all(self, leased: list[Lease]) -> None:
        for one in leased:
            try:
                await self._return_lease(one)
            except Exception as error:  # then its lease will expire
                _log.warning("attempt %s was leased to a worker that is gone: %s", one.attempt.id, error)

    def _next_batch(self) -> set[_WaitingRequest]:
        """Return the new requests, and of those that wait as many of the oldest as there are new rollouts."""
        batch = {request for request in self._new if not request.leased.done()}
        self._new = []
        for run, count in self._new_work.items():
            for queue in (self._waiting.get(None, {}), self._waiting.get(run, {})):
                batch.update(islice(_unanswered(queue), count))
        self._new_work.clear()
        return batch


def _unanswered(queue: dict[_WaitingRequest, None]) -> Iterator[_WaitingRequest]:
    return (request for request in queue if not request.leased.done())
