"""Exponential back-off with jitter, for every retry in Leyden."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")


class Backoff(Struct, frozen=True):
    """Waits `first_s` after the first failure and twice as long after each further one, up to `max_s`."""

    first_s: float
    max_s: float

    def limit_s(self, failures: int) -> float:
        """Return the longest wait after this many failures in a row. It is not random: the store keeps such waits."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 64))

    def delay_s(self, failures: int) -> float:
        """Return a random wait between half of `limit_s` and all of it, so that clients do not retry in step."""
        return self.limit_s(failures) * random.uniform(0.5, 1.0)

    async def wait(self, failures: int) -> None:
        """Sleep for `delay_s`."""
        await asyncio.sleep(self.delay_s(failures))

    async def retry(
        self, work: Callable[[], Awaitable[T]], tries: int, on: type[Exception] | tuple[type[Exception], ...]
    ) -> T:
        """Return what `work` returns. It is called again when it raises one of `on`, so many times in all."""
        for failures in range(1, tries):
            try:
                return await work()
            except on:
                await self.wait(failures)
        return await work()
