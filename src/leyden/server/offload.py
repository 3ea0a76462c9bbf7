"""Runs CPU-bound work in threads, so that the event loop stays free for others.

Work of one key runs one piece after another: a key that sends much delays itself and not the rest.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 2


class Offload:
    """Threads for the work of many keys."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "leyden-offload")
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    async def run(self, key: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread, after the earlier ones of the same key."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]
