"""Polls the stores that other processes write, while a page listens, and reports their new events.

A store whose files have not changed is not read, so a folder of many finished runs costs a few `stat` calls for each.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import DatabaseError

from leyden.background import start_background
from leyden.server.dashboard.run_stores import Counts, RunStores, Signature, signature
from leyden.store.errors import StoreError
from leyden.store.read.views import count_events, last_event_before

_INTERVAL_S = 0.2
_INODE = 2
"""Its position in the state of a file."""
_RECENT_S = 2.0
"""A page that starts to listen has read its data at most so long ago.

A file that is younger is read at each poll: a write within the same tick of the clock leaves its time as it was.
"""

OnChange = Callable[[Counts], None]
Seen = dict[Path, tuple[Signature, int]]
"""By folder, the state of its files at the last poll, and the newest event that was reported."""


class StorePolling:
    """Reports the events of other processes' runs to listeners."""

    def __init__(self, stores: RunStores) -> None:
        self._stores = stores
        self._listeners: list[OnChange] = []
        self._polling: asyncio.Task[None] | None = None
        self._joined = False

    @contextmanager
    def listen(self, on_change: OnChange) -> Iterator[None]:
        """Call a function for new events, and first for those of the last two seconds, within this context."""
        self._listeners.append(on_change)
        self._joined = True
        if self._polling is None:
            self._polling = start_background(self._poll(), "the polling of the stores of other runs")
        try:
            yield
        finally:
            self._listeners.remove(on_change)
            if not self._listeners:
                self._polling.cancel()
                self._polling = None

    async def _poll(self) -> None:
        seen: Seen = {}
        while True:
            if self._joined:
                self._joined, seen = False, {}
            seen, found = await self._stores.in_thread(partial(self._read, seen))
            if found and (counts := await self._stores.name_counts(found)):
                for on_change in tuple(self._listeners):
                    on_change(counts)
            await asyncio.sleep(_INTERVAL_S)

    def _read(self, seen: Seen) -> tuple[Seen, dict[Path, Counts]]:
        now, found, counts = time.time(), Seen(), dict[Path, Counts]()
        for folder in self._stores.folders():
            try:
                files = signature(folder)
                before, last = seen.get(folder, (None, None))
                if before is not None and before[0][_INODE] != files[0][_INODE]:  # a run of this name was started anew
                    last = 0
                changed = max(modified for modified, _, _ in files) / 1e9
                if last is None or files != before or now - changed < _RECENT_S:
                    last, new = self._stores.read_other(folder, partial(recent_events, after=last))
                    if new:
                        counts[folder] = new
                found[folder] = files, last
            except (StoreError, DatabaseError, OSError):  # damaged, of a newer version, or deleted meanwhile
                continue
        return found, counts


def recent_events(reader: Connection, after: int | None = None) -> tuple[int, Counts]:
    """Count the events after a number, by default those of the last two seconds; return the newest number as well."""
    return count_events(reader, last_event_before(reader, time.time() - _RECENT_S) if after is None else after)
