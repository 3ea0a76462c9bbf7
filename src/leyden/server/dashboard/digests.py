"""Keeps the totals of runs that pages show. Requests without an event in between share them; events update them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from leyden.store.read.run_digest import RunDigest
from leyden.store.read.run_totals import RunTotals

StoreRun = tuple[Path | None, str]
"""The folder of a store (None: this server's) and a run in it."""
FollowedRun = tuple[RunTotals, RunDigest]


class RunDigests:
    """The totals of each run that a page has shown, until `keep` or `forget` is told that the run is gone."""

    def __init__(self) -> None:
        self._known: dict[StoreRun, tuple[int, asyncio.Task[FollowedRun]]] = {}
        self._totals: dict[StoreRun, RunTotals] = {}

    async def get(
        self, run: StoreRun, last_event: int, read: Callable[[RunTotals | None], Awaitable[FollowedRun]]
    ) -> RunDigest:
        """Return the totals of a run, which include every event up to `last_event`.

        If these are older, `read` is called with the newest totals that are known.
        """
        known = self._known.get(run)
        if known is None or known[0] != last_event:
            known = last_event, asyncio.ensure_future(read(self._totals.get(run)))
            self._known[run] = known
        try:
            totals, digest = await asyncio.shield(known[1])
        except Exception:
            if self._known.get(run) is known:
                del self._known[run]
            raise
        self._totals[run] = totals
        if totals.created is None:  # no store has the run
            self.forget(run)
        return digest

    def keep(self, runs: Collection[StoreRun]) -> None:
        """Forget all runs but these."""
        for run in (self._known.keys() | self._totals.keys()) - set(runs):
            self.forget(run)

    def forget(self, run: StoreRun) -> None:
        """Forget the totals of a run that is gone."""
        self._known.pop(run, None)
        self._totals.pop(run, None)
