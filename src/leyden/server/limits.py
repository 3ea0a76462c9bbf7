"""How much one key may ask for: so many requests a second, and so many at once."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from leyden.server.keys import KeyKind


class Limit(Struct, frozen=True):
    """A sustained rate with a burst of two seconds' worth, and a concurrency."""

    per_second: float
    at_once: int


LIMITS: dict[KeyKind, Limit] = {
    # Generous: they stop a runaway, not a busy system. A pool or a worker speaks for many rollouts.
    KeyKind.ADMIN: Limit(20_000, 8192),
    KeyKind.WORKER: Limit(20_000, 8192),
    KeyKind.POOL: Limit(5_000, 4096),
    KeyKind.ATTEMPT: Limit(200, 128),
    KeyKind.VIEWER: Limit(100, 64),
}


class TooMany(Exception):
    """A key that asks for too much; it may come again after so many seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _Account:
    __slots__ = ("at", "at_once", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens, self.at, self.at_once = tokens, at, 0


class Limiter:
    """One token bucket and one counter a key; idle keys are forgotten."""

    _REMEMBERED = 4096

    def __init__(self, limits: dict[KeyKind, Limit] = LIMITS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    @contextmanager
    def admit(self, kind: KeyKind, id: str) -> Iterator[None]:
        """Let one request of a key in, or raise `TooMany`."""
        limit, now = self._limits[kind], self._clock()
        account = self._accounts.get(id)
        if account is None:
            account = self._accounts[id] = _Account(2 * limit.per_second, now)
            self._forget()
        else:
            self._accounts.move_to_end(id)
        account.tokens = min(2 * limit.per_second, account.tokens + (now - account.at) * limit.per_second)
        account.at = now
        if account.tokens < 1:
            raise TooMany(f"more than {limit.per_second:g} requests a second", (1 - account.tokens) / limit.per_second)
        if account.at_once >= limit.at_once:
            raise TooMany(f"more than {limit.at_once} requests at once", 1.0)
        account.tokens -= 1
        account.at_once += 1
        try:
            yield
        finally:
            account.at_once -= 1

    def _forget(self) -> None:
        while len(self._accounts) > self._REMEMBERED:
            id, oldest = next(iter(self._accounts.items()))
            if oldest.at_once:  # in use: it is not idle after all
                self._accounts.move_to_end(id)
                return
            del self._accounts[id]
