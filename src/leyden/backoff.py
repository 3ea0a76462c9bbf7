"""Exponential back-off with jitter: the one schedule by which everything here waits before it tries again."""

import asyncio
import random

from msgspec import Struct


class Backoff(Struct, frozen=True):
    """Waits `first_s` after the first failure and twice as long after each further one, up to `max_s`."""

    first_s: float
    max_s: float

    def limit_s(self, failures: int) -> float:
        """The longest wait after this many failures in a row. Deterministic: a wait that is stored uses it as it is."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 64))

    def delay_s(self, failures: int) -> float:
        """A random wait between half of `limit_s` and all of it, so that many clients do not retry in step."""
        return self.limit_s(failures) * random.uniform(0.5, 1.0)

    async def wait(self, failures: int) -> None:
        """Sleep for `delay_s`."""
        await asyncio.sleep(self.delay_s(failures))
