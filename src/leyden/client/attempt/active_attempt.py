"""The worker's state of one attempt, from its lease until its end is reported, and its time limit."""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from leyden.api.wire import FinishRequest, Lease
from leyden.background import start_background
from leyden.outcomes import Ending, Outcome
from leyden.records import Reward


class ActiveAttempt:
    """A leased attempt that this worker runs.

    Several parties may end it: its code returns, its time is up, its process dies, or the server cancels it. Each calls
    `resolve`; the first call decides how the attempt ended, and later calls have no effect.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.id = lease.id
        self.end: asyncio.Future[FinishRequest | None] = asyncio.get_running_loop().create_future()
        """How the attempt ended; None if the server ended it and wants no report."""
        self.released = asyncio.Event()
        """Set when its code has returned, or the process that ran it is gone."""
        self.has_spans = False
        """Whether its spans must be exported before its end is reported: the server accepts none afterwards."""
        self.step_rewards: list[Reward] = []
        """Rewards that the agent gave while it ran, in order."""
        self.task: asyncio.Task[None] | None = None

    def resolve(self, end: FinishRequest | None) -> None:
        """Decide how the attempt ended, unless that is decided already."""
        if not self.end.done():
            self.end.set_result(end)

    def abandon(self) -> None:
        """Cancel what this worker does for the attempt, without a report."""
        if self.task is not None:
            self.task.cancel()


TimeOut = Callable[[Lease, float], Awaitable[float]]
"""Asks the server how much time an attempt has left that has run for so many seconds; at 0 its calls are cut."""

_SHORTEST_WAIT_S = 0.1
"""While a call waits, the time that is left stays the same: do not ask all the time."""


class TimeLimit:
    """The time limit of one attempt that runs.

    The server decides: time in which the attempt's calls waited for the infrastructure does not count, and at the limit
    it cuts the calls in flight and records them before the worker stops the attempt's code.
    """

    def __init__(self, active: ActiveAttempt, limit_s: float, time_out: TimeOut) -> None:
        self._active, self._limit_s, self._time_out = active, limit_s, time_out
        self._asking: asyncio.Task[float] | None = None
        self.timeout = FinishRequest(
            Outcome(Ending.TIMEOUT, f"the agent took longer than {limit_s:g} s (`rollout.time_limit_s`)")
        )
        """The end of an attempt that reaches its limit."""

    async def wait_end(self) -> FinishRequest | None:
        """Wait until the attempt has ended; return how, None if the server ended it.

        Code that returns while the server is asked may have returned because its calls were cut, so the answer decides.
        """
        waiting = start_background(self._wait(), "the time limit of an attempt")
        try:
            end = await self._active.end
            if end is None or end is self.timeout or self._asking is None or await self._asking > 0:
                return end
            return replace(self.timeout, output=end.output)
        finally:
            waiting.cancel()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        started, left_s = loop.time(), self._limit_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            ran_s = loop.time() - started
            self._asking = asyncio.ensure_future(self._time_out(self._active.lease, ran_s))
            left_s = await asyncio.shield(self._asking)
            if left_s > 0:
                self._asking = None
                left_s = max(left_s, _SHORTEST_WAIT_S)
        self._active.resolve(self.timeout)
