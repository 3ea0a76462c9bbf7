"""Keeps the leases of a worker's attempts alive."""

import asyncio

from leyden.api.client import RetryingRemote
from leyden.api.wire import HeartbeatRequest
from leyden.background import wait_set
from leyden.client.attempt.active_attempt import ActiveAttempt


class Heartbeat:
    """Sends one heartbeat for all attempts of a worker, at a third of the shortest lease."""

    def __init__(self, client: RetryingRemote, worker: str) -> None:
        self._client, self._worker = client, worker
        self._attempts: dict[str, ActiveAttempt] = {}
        self._next_s: float | None = None
        """When the next heartbeat is due, in the time of the event loop. A new attempt only moves it earlier."""
        self._moved = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.any_tracked = asyncio.Event()
        """Set when the first attempt is tracked."""

    def tracked(self) -> list[ActiveAttempt]:
        """Return the attempts that are kept alive now."""
        return list(self._attempts.values())

    def track(self, active: ActiveAttempt) -> None:
        """Keep an attempt alive from now on."""
        self._attempts[active.id] = active
        self._idle.clear()
        self.any_tracked.set()
        self._schedule(active.lease.lease_s / 3)

    def untrack(self, active: ActiveAttempt) -> None:
        """Stop keeping an attempt alive: it is reported, or needs no report."""
        self._attempts.pop(active.id, None)
        if not self._attempts:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no attempt is tracked; return whether that was so before the timeout."""
        return await wait_set(self._idle, timeout_s)

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            self._moved.clear()
            if await wait_set(self._moved, self._next_s and self._next_s - asyncio.get_running_loop().time()):
                continue
            self._next_s = None
            if self._attempts:
                await self._send(self._interval_s())
            if self._attempts:
                self._schedule(self._interval_s())

    def _schedule(self, delay_s: float) -> None:
        due_s = asyncio.get_running_loop().time() + delay_s
        if self._next_s is None or due_s < self._next_s:
            self._next_s = due_s
            self._moved.set()

    async def _send(self, interval_s: float) -> None:
        client = self._client.limited(max(1.0, interval_s), max_backoff_s=interval_s)
        reply = await client.heartbeat(self._worker, HeartbeatRequest(tuple(self._attempts)))
        for ended in reply.ended:
            if (active := self._attempts.get(ended.attempt)) is not None:
                active.resolve(None)

    def _interval_s(self) -> float:
        return min(active.lease.lease_s for active in self._attempts.values()) / 3
