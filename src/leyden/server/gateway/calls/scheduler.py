"""Decides which call uses a model's engine next: none while it is on hold, otherwise the rollouts in turn."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from leyden.server.gateway.calls.waiting import WaitTimer
from leyden.server.gateway.errors import ErrorKind, GatewayError


class Scheduler:
    """Gives the slots of one served model to calls, round-robin over their rollouts.

    `slots` calls run concurrently, at most `max_waiting` wait, and none waits longer than `max_wait_s`.
    """

    def __init__(self, slots: int = 256, max_waiting: int = 8192, max_wait_s: float = 600.0) -> None:
        self.slots = self._free = slots
        """How many calls can run concurrently, and how many more can now."""
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By rollout, the calls that wait; the rollout that is next comes first."""
        self.waiting = 0
        """How many calls wait."""
        self.held = False
        """Whether no slot is granted."""
        self._running: set[WaitTimer] = set()

    @property
    def running(self) -> int:
        """How many calls have a slot."""
        return self.slots - self._free

    @property
    def queue_pressure(self) -> float | None:
        """Waiting calls per slot; None while on hold, when the queue says nothing about the load."""
        return None if self.held else self.waiting / self.slots

    @property
    def _has_free_slot(self) -> bool:
        return self._free > 0 and not self.held and not self._waiting

    def refuse_if_full(self) -> None:
        """Raise if the queue is full. Checked before an answer starts, so that the caller gets a proper status."""
        if not self._has_free_slot and self.waiting >= self._max_waiting:
            raise GatewayError(
                ErrorKind.RATE_LIMITED, "too many calls are waiting for the model: try again", retry_after=1.0
            )

    @asynccontextmanager
    async def slot(self, rollout: str, timer: WaitTimer) -> AsyncIterator[None]:
        """Wait for a slot; release it when the block ends. The timer runs while the call waits or is on hold."""
        timer.begin("scheduler")
        try:
            await self._acquire(rollout)
        finally:
            timer.end("scheduler")
        self._running.add(timer)
        if self.held:  # since the slot was granted
            timer.begin("scheduler")
        try:
            yield
        finally:
            self._running.discard(timer)
            timer.end("scheduler")
            self._free += 1
            self._grant_slots()

    def hold(self) -> None:
        """Grant no slot until `resume`, for a change of weights. Calls that have a slot keep it and finish."""
        self.held = True
        for timer in self._running:
            timer.begin("scheduler")

    def resume(self) -> None:
        """Grant slots again, in the order of the queue."""
        self.held = False
        for timer in self._running:
            timer.end("scheduler")
        self._grant_slots()

    async def _acquire(self, rollout: str) -> None:
        if self._has_free_slot:
            self._free -= 1
            return
        self.refuse_if_full()
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(rollout, deque()).append(granted)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await granted
        except (TimeoutError, asyncio.CancelledError) as error:
            if granted.done() and not granted.cancelled():  # granted at the same time: return the slot
                self._free += 1
                self._grant_slots()
            else:
                self._dequeue(rollout, granted)
            if isinstance(error, TimeoutError):
                message = f"no slot of the model was free for {self._max_wait_s:g} s"
                raise GatewayError(ErrorKind.FAILED, message, retry_after=5.0) from error
            raise

    def _dequeue(self, rollout: str, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(rollout)
        if queue is not None and granted in queue:
            queue.remove(granted)
            self.waiting -= 1
            if not queue:
                del self._waiting[rollout]

    def _grant_slots(self) -> None:
        while self._free > 0 and not self.held and self._waiting:
            rollout, queue = next(iter(self._waiting.items()))
            granted = queue.popleft()
            self.waiting -= 1
            del self._waiting[rollout]
            if queue:
                self._waiting[rollout] = queue  # at the end: each other rollout comes first
            if not granted.done():
                self._free -= 1
                granted.set_result(None)
