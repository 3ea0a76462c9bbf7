"""Keeps the totals of runs until an event of the run makes them old, so that the requests of one page share a query."""

import asyncio
from collections import Counter

from leyden.records import Event
from leyden.store.run_digest import RunDigest, digest_run
from leyden.store.store import Store


class RunDigests:
    """The totals of each run that a page has shown."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._events = Counter[str]()
        """Events of each run since the start of this server."""
        self._known: dict[str, tuple[int, asyncio.Task[RunDigest]]] = {}
        store.notifications.subscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        self._events[event.run] += 1

    async def get(self, run: str) -> RunDigest:
        """Return the totals of a run, which include every event until now."""
        events = self._events[run]
        known = self._known.get(run)
        if known is None or known[0] != events:
            known = events, asyncio.ensure_future(self._store.read(digest_run, run))
            self._known[run] = known
        try:
            return await asyncio.shield(known[1])
        except Exception:
            if self._known.get(run) is known:
                del self._known[run]
            raise
