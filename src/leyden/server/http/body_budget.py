"""Bounds the memory of request bodies that are being received, for each key and over all keys.

A body may arrive slowly and a key may send many at once, so the limit of one body does not bound their sum. If all
keys together hold too much, only keys with more than their share are refused: one cannot keep the others from sending.
"""

from collections import Counter
from typing import Self

from leyden.server.http.expansion import MAX_UNCOUNTED_BYTES
from leyden.server.http.limits import RateLimited

_BODIES_OF_A_KEY, _BODIES = 4, 16
"""In units of the largest body."""
_RETRY_AFTER_S = 1.0


class BodyReservation:
    """The bytes of one body that have arrived; a context in which the body is received."""

    def __init__(self, budget: "BodyBudget", key: str) -> None:
        self._budget, self._key = budget, key
        self.size = 0

    def grow(self, size: int) -> None:
        """Count the body with its new size. Raises `RateLimited` where its key holds too much."""
        if size > MAX_UNCOUNTED_BYTES:
            self._budget.reserve(self._key, size - self.size)
            self.size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size:
            self._budget.release(self._key, self.size)


class BodyBudget:
    """The bytes of large bodies that are being received."""

    def __init__(self, max_body: int) -> None:
        self._max_of_key, self._max = _BODIES_OF_A_KEY * max_body, _BODIES * max_body
        self._held: Counter[str] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """The bytes of all keys."""
        return self._total

    def reserve(self, key: str, size: int) -> None:
        """Count more bytes of a key, or raise `RateLimited`."""
        held = self._held[key] + size
        allowed = self._max_of_key
        if self._total + size > self._max:
            allowed = min(allowed, self._max // len({*self._held, key}))
        if held > allowed:
            raise RateLimited(f"more than {allowed >> 20} MB of bodies at once", _RETRY_AFTER_S)
        self._held[key] = held
        self._total += size

    def release(self, key: str, size: int) -> None:
        """Stop counting bytes of a key."""
        self._total -= size
        self._held[key] -= size
        if not self._held[key]:
            del self._held[key]

    def receiving(self, key: str) -> BodyReservation:
        """Return the context in which one body of a key is received."""
        return BodyReservation(self, key)
