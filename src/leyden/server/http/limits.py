"""Limits per key: its rate, its concurrent requests and connections, and the memory of bodies that it sends."""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Self

from msgspec import Struct

from leyden import defaults
from leyden.server.control.keys import KeyKind

SMALL_BODY = 250_000
"""Bytes of a body whose memory and values are not counted."""
_BODIES_OF_A_KEY, _BODIES = 4, 16
"""In units of the largest body."""
_RETRY_AFTER_S = 1.0


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
    KeyKind.ATTEMPT: Limit(200, defaults.CONCURRENT_CALLS, 256, 0.25),
    KeyKind.VIEWER: Limit(100, 64, 256, 0.25),
    KeyKind.CLIENT: Limit(5_000, 4096, 8192, 0.75),
}


def limits_for(concurrent_calls: int) -> dict[KeyKind, Limit]:
    """Return the limits of a server whose attempts may have so many requests at once; their other limits grow along."""
    usual = LIMITS[KeyKind.ATTEMPT]
    factor = concurrent_calls / usual.concurrency
    own = Limit(usual.per_second * factor, concurrent_calls, math.ceil(usual.connections * factor), usual.share)
    return {**LIMITS, KeyKind.ATTEMPT: own}


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
        self.limits = limits
        self._clock = clock
        self._usage: OrderedDict[str, KeyUsage] = OrderedDict()

    def admit(self, kind: KeyKind, id: str) -> KeyUsage:
        """Count one request of a key, or raise `RateLimited`; return the context in which it is active."""
        limit, now = self.limits[kind], self._clock()
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
            key = " (server.concurrent_calls, --concurrent-calls)" if kind is KeyKind.ATTEMPT else ""
            raise RateLimited(f"more than {limit.concurrency} requests at once{key}", 1.0)
        usage.tokens -= 1
        return usage

    def _forget(self) -> None:
        while len(self._usage) > self._MAX_KEYS:
            id, oldest = next(iter(self._usage.items()))
            if oldest.active:  # in use, so not idle
                self._usage.move_to_end(id)
                return
            del self._usage[id]


class BodyReservation:
    """The bytes of one body that have arrived; a context in which the body is received."""

    def __init__(self, budget: "BodyBudget", key: str) -> None:
        self._budget, self._key = budget, key
        self.size = 0

    def grow(self, size: int) -> None:
        """Count the body with its new size. Raises `RateLimited` if its key holds too much."""
        if size > SMALL_BODY:
            self._budget.reserve(self._key, size - self.size)
            self.size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size:
            self._budget.release(self._key, self.size)


class BodyBudget:
    """The bytes of large bodies that are being received, of each key and over all keys.

    A body may arrive slowly and a key may send many at once, so the limit of one body does not bound their sum. If all
    keys together hold too much, only keys with more than their share are refused: one cannot keep the others from
    sending.
    """

    def __init__(self, max_body: int) -> None:
        self._max_of_key, self._max = _BODIES_OF_A_KEY * max_body, _BODIES * max_body
        self._held: Counter[str] = Counter()
        self.total = 0
        """The bytes of all keys."""

    def reserve(self, key: str, size: int) -> None:
        """Count more bytes of a key, or raise `RateLimited`."""
        held = self._held[key] + size
        allowed = self._max_of_key
        if self.total + size > self._max:
            allowed = min(allowed, self._max // len({*self._held, key}))
        if held > allowed:
            raise RateLimited(f"more than {allowed >> 20} MB of bodies at once", _RETRY_AFTER_S)
        self._held[key] = held
        self.total += size

    def release(self, key: str, size: int) -> None:
        """Stop counting bytes of a key."""
        self.total -= size
        self._held[key] -= size
        if not self._held[key]:
            del self._held[key]

    def receiving(self, key: str) -> BodyReservation:
        """Return the context in which one body of a key is received."""
        return BodyReservation(self, key)
