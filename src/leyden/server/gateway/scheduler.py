"""Who may use the engine next: nobody while it changes its weights, and otherwise each rollout in its turn."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from leyden.server.gateway.errors import ErrorKind, GatewayError


class Scheduler:
    """So many calls at once, so many waiting. A waiting call of a rollout comes after one of each other rollout."""

    def __init__(self, at_once: int = 256, waiting: int = 8192, hold_limit_s: float = 600.0) -> None:
        self._at_once = self._free = at_once
        self._most_waiting = waiting
        self._hold_limit_s = hold_limit_s
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._held = False

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def crowding(self) -> float | None:
        """How many calls wait for each that may be in; None while nobody is let in, and all wait for something else."""
        return None if self._held else self.waiting / self._at_once

    @property
    def _is_open(self) -> bool:
        return self._free > 0 and not self._held and not self._waiting

    def refuse_if_full(self) -> None:
        """Raise if one more would not even be let wait: good to know before an answer has begun."""
        if not self._is_open and self.waiting >= self._most_waiting:
            raise GatewayError(ErrorKind.BUSY, "too many calls are waiting for the model: try again", retry_after=1.0)

    @asynccontextmanager
    async def admit(self, rollout: str) -> AsyncIterator[None]:
        """Wait for a turn, and give it up in the end."""
        await self._enter(rollout)
        try:
            yield
        finally:
            self._free += 1
            self._release()

    def hold(self) -> None:
        """Let nobody in until `resume`; who is in stays in."""
        self._held = True

    def resume(self) -> None:
        """Let those who wait in, in their order."""
        self._held = False
        self._release()

    async def _enter(self, rollout: str) -> None:
        if self._is_open:
            self._free -= 1
            return
        self.refuse_if_full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(rollout, deque()).append(turn)
        try:
            async with asyncio.timeout(self._hold_limit_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():  # admitted, and gone before it knew
                self._free += 1
                self._release()
            else:
                self._leave(rollout, turn)
            if isinstance(error, TimeoutError):
                message = f"the model was not to be had for {self._hold_limit_s:g} s"
                raise GatewayError(ErrorKind.FAILED, message, retry_after=5.0) from error
            raise

    def _leave(self, rollout: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(rollout)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[rollout]

    def _release(self) -> None:
        while self._free > 0 and not self._held and self._waiting:
            rollout, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            del self._waiting[rollout]
            if queue:
                self._waiting[rollout] = queue  # to the end: the others come first
            if not turn.done():
                self._free -= 1
                turn.set_result(None)
