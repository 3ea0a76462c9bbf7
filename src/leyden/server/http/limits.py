"""Rate and concurrency limits per key."""

import time
from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct

from leyden.server.control.keys import KeyKind


class Limit(Struct, frozen=True):
    """A sustained rate, with a burst of two seconds' worth, and the numbers of concurrent requests and connections."""

    per_second: float
    concurrency: int
    connections: int
    share: float
    """Of all connections that the server may have, at most."""


LIMITS: dict[KeyKind, Limit] = {
    # Generous: they stop a runaway client, not a busy system. A pool or a worker serves many rollouts.
    KeyKind.ADMIN: Limit(20_000, 8192, 16_384, 1.0),
    KeyKind.WORKER: Limit(20_000, 8192, 16_384, 1.0),
    KeyKind.POOL: Limit(5_000, 4096, 8192, 0.75),
    KeyKind.ATTEMPT: Limit(200, 128, 256, 0.25),
    KeyKind.VIEWER: Limit(100, 64, 256, 0.25),
    KeyKind.CLIENT: Limit(5_000, 4096, 8192, 0.75),
}


class RateLimited(Exception):
    """A key has reached a limit; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KeyUsage:
    """What a key has used of its limits; a context in which one more of its requests is active."""

    __slots__ = ("active", "tokens", "updated")

    def __init__(self, tokens: float, updated: float) -> None:
        self.tokens, self.updated, self.active = tokens, updated, 0

    def __enter__(self) -> None:
        self.active += 1

    def __exit__(self, *_: object) -> None:
        self.active -= 1


class Limiter:
    """Keeps a token bucket and a counter of active requests for each key; idle keys are forgotten."""

    _MAX_KEYS = 4096

    def __init__(self, limits: dict[KeyKind, Limit] = LIMITS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._usage: OrderedDict[str, KeyUsage] = OrderedDict()

    def admit(self, kind: KeyKind, id: str) -> KeyUsage:
        """Count one request of a key, or raise `RateLimited`; return the context in which it is active."""
        limit, now = self._limits[kind], self._clock()
        usage = self._usage.get(id)
        if usage is None:
            usage = self._usage[id] = KeyUsage(2 * limit.per_second, now)
            self._forget()
        else:
            self._usage.move_to_end(id)
        usage.tokens = min(2 * limit.per_second, usage.tokens + (now - usage.updated) * limit.per_second)
        usage.updated = now
        if usage.tokens < 1:
            retry_after = (1 - usage.tokens) / limit.per_second
            raise RateLimited(f"more than {limit.per_second:g} requests a second", retry_after)
        if usage.active >= limit.concurrency:
            raise RateLimited(f"more than {limit.concurrency} requests at once", 1.0)
        usage.tokens -= 1
        return usage

    def _forget(self) -> None:
        while len(self._usage) > self._MAX_KEYS:
            id, oldest = next(iter(self._usage.items()))
            if oldest.active:  # in use, so not idle
                self._usage.move_to_end(id)
                return
            del self._usage[id]
