"""Keeps the totals of runs until an event of the run makes them old, so that the requests of one page share a query."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from leyden.store.run_digest import RunDigest

StoreRun = tuple[Path | None, str]
"""The folder of a store (None: this server's) and a run in it."""


class RunDigests:
    """The totals of each run that a page has shown."""

    def __init__(self) -> None:
        self._known: dict[StoreRun, tuple[int, asyncio.Task[RunDigest]]] = {}

    async def get(self, run: StoreRun, last_event: int, read: Callable[[], Awaitable[RunDigest]]) -> RunDigest:
        """Return the totals of a run, which include every event up to `last_event`; read them if these are older."""
        known = self._known.get(run)
        if known is None or known[0] != last_event:
            known = last_event, asyncio.ensure_future(read())
            self._known[run] = known
        try:
            return await asyncio.shield(known[1])
        except Exception:
            if self._known.get(run) is known:
                del self._known[run]
            raise
