"""Finds the store of a run that pages show: this server's, or the own store of a run trained in its home folder.

The stores of other runs are only read. A process that trains may write to them at the same time.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from leyden.server.dashboard.digests import RunDigests
from leyden.store import views
from leyden.store.database import Database
from leyden.store.errors import StoreError
from leyden.store.run_digest import RunDigest, digest_run
from leyden.store.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class RunStores:
    """Reads runs of this server and of the folders in its home."""

    def __init__(self, store: Store, home: Path | None) -> None:
        self._store, self._home = store, home
        self._digests = RunDigests(store)
        self._opened: dict[Path, Database] = {}
        self._folders: dict[str, Path] = {}
        """By run, the folder of its own store."""

    async def read(
        self, run: str, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a query in the store that has the run; in this server's if none has."""
        folder = await self.folder_of(run)
        if folder is None:
            return await self._store.read(query, *args, **kwargs)
        return await asyncio.to_thread(lambda: self._read_other(folder, lambda reader: query(reader, *args, **kwargs)))

    async def digest(self, run: str) -> RunDigest:
        """Return the totals of a run."""
        if await self.folder_of(run) is None:
            return await self._digests.get(run)
        return await self.read(run, digest_run, run)

    async def runs(self, only: str | None) -> list[str]:
        """Return the ids of all runs, newest first within each store, or of one if it exists."""
        own = await self._store.read(views.open_runs, only)
        await asyncio.to_thread(self._find_others)
        return [*own, *(run for run in self._folders if run not in own and only in (None, run))]

    async def folder_of(self, run: str) -> Path | None:
        """Return the folder of a run's own store; None where this server has the run, or nobody."""
        own = await self._store.read(views.open_runs, run)
        if self._home is None or own:
            return None
        if run not in self._folders:
            await asyncio.to_thread(self._find_others)
        return self._folders.get(run)

    def close(self) -> None:
        """Close the stores of other runs."""
        for database in self._opened.values():
            database.close()
        self._opened.clear()

    def _find_others(self) -> None:
        found: dict[str, Path] = {}
        for path in sorted(self._home.glob("*/leyden.db")) if self._home is not None else ():
            try:
                for run in self._read_other(path.parent, views.open_runs):
                    found[run] = path.parent
            except StoreError:  # of a newer version, or damaged: the other runs can be shown
                continue
        self._folders = found

    def _read_other(self, folder: Path, query: Callable[[Connection], T]) -> T:
        if folder not in self._opened:
            self._opened[folder] = Database(str(folder / "leyden.db"), readonly=True)
        with self._opened[folder].reader.begin() as connection:
            return query(connection)
