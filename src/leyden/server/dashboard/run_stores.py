"""Finds the store of a run that pages show: this server's, or the own store of a run trained in its home folder.

The stores of other runs are only read. A process that trains may write to them at the same time.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DatabaseError

from leyden.background import start_background
from leyden.server.dashboard.digests import FollowedRun, RunDigests
from leyden.store import views
from leyden.store.database import Database
from leyden.store.errors import StoreClosed, StoreError
from leyden.store.run_digest import RunDigest, follow_run
from leyden.store.run_lock import is_run_held
from leyden.store.run_totals import RunTotals
from leyden.store.store import Store

P = ParamSpec("P")
T = TypeVar("T")


_ACTIVE_S = 600.0
_THREADS = 4
"""For pages only: opening large stores takes long, and must not keep model calls from a thread."""
Signature = tuple[tuple[int, int, int], ...]


def signature(folder: Path) -> Signature:
    """Return time, size and inode of a store's files. The write-ahead log changes with every commit.

    Raises `OSError` where the store was deleted.
    """
    found = [(folder / "leyden.db").stat()]
    with suppress(FileNotFoundError):
        found.append((folder / "leyden.db-wal").stat())
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found)


class RunStores:
    """Reads runs of this server and of the folders in its home."""

    def __init__(self, store: Store, home: Path | None) -> None:
        self._store, self._home = store, home
        self._digests = RunDigests()
        self._opened: dict[Path, tuple[int, Database]] = {}
        """By folder, the inode of the file and the database."""
        self._opening = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(_THREADS, "leyden-runs")
        self._folders: dict[str, Path] = {}
        """By run, the folder of its own store."""
        self._preparing: set[asyncio.Task[None]] = set()

    async def read(
        self, run: str, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a query in the store that has the run; in this server's if none has."""
        return await self._read(await self.folder_of(run), lambda reader: query(reader, *args, **kwargs))

    async def digest(self, run: str) -> RunDigest:
        """Return the totals of a run."""
        folder = await self.folder_of(run)
        newest = await self._read(folder, partial(views.newest_event, run=run))

        def read(known: RunTotals | None) -> Awaitable[FollowedRun]:
            return self._read(folder, partial(follow_run, run=run, known=known))

        return await self._digests.get((folder, run), newest.seq, read)

    def prepare(self, run: str) -> None:
        """Start to read the totals of a run, for requests that are about to come."""

        async def read() -> None:
            with suppress(StoreError, DatabaseError, OSError):  # the requests will say what is wrong
                await self.digest(run)

        task = start_background(read(), "the reading of a run's totals")
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def runs(self, only: str | None) -> list[str]:
        """Return the ids of all runs, newest first within each store, or of one if it exists.

        When all are listed, the totals of runs that were deleted are forgotten.
        """
        own = await self._store.read(views.open_runs, only)
        await self.in_thread(self._find_others)
        if only is None:
            self._digests.keep(
                [*((None, run) for run in own), *((folder, run) for run, folder in self._folders.items())]
            )
        return [*own, *(run for run in self._folders if run not in own and only in (None, run))]

    async def folder_of(self, run: str) -> Path | None:
        """Return the folder of a run's own store; None where this server has the run, or no store has it."""
        own = await self._store.read(views.open_runs, run)
        if self._home is None or own:
            return None
        return await self.in_thread(partial(self._find_folder, run))

    def folders(self) -> list[Path]:
        """Return the folders of the home that have a store. Stores that were deleted are closed, to free space."""
        found = [path.parent for path in sorted(self._home.glob("*/leyden.db"))] if self._home is not None else []
        with self._opening:
            for deleted in self._opened.keys() - set(found):
                self._opened.pop(deleted)[1].close()
        return found

    def read_other(self, folder: Path, query: Callable[[Connection], T]) -> T:
        """Run a query in the store of a folder. Raises `OSError` or `StoreError` where it cannot be opened."""
        with self._open(folder).reader.begin() as connection:
            return query(connection)

    def _open(self, folder: Path) -> Database:
        path = folder / "leyden.db"
        with self._opening:  # threads read at the same time, and each store is opened once
            if self._closed:
                raise StoreClosed("the server stops")
            inode = path.stat().st_ino
            if folder in self._opened and self._opened[folder][0] != inode:  # the run was deleted and started again
                self._opened.pop(folder)[1].close()
            if folder not in self._opened:
                self._opened[folder] = inode, Database(str(path), readonly=True)
            return self._opened[folder][1]

    async def read_active(self, query: Callable[[Connection], T]) -> list[T]:
        """Run a query in each other store that was written to in the last ten minutes, unless its process has ended."""

        def read() -> list[T]:
            found = []
            for folder in self.folders():
                with suppress(StoreError, DatabaseError, OSError):  # damaged, of a newer version, or just deleted
                    if (
                        is_run_held(folder) is not False
                        and time.time() - max(modified for modified, _, _ in signature(folder)) / 1e9 < _ACTIVE_S
                    ):
                        found.append(self.read_other(folder, query))
            return found

        return await self.in_thread(read)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work that reads files of other runs, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Close the stores of other runs."""
        for task in self._preparing:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._opening:
            self._closed = True
            for _, database in self._opened.values():
                database.close()
            self._opened.clear()

    async def _read(self, folder: Path | None, query: Callable[[Connection], T]) -> T:
        if folder is None:
            return await self._store.read(query)
        return await self.in_thread(partial(self.read_other, folder, query))

    def _find_folder(self, run: str) -> Path | None:
        known = self._folders.get(run)
        if known is None or not (known / "leyden.db").exists():
            self._find_others()
        return self._folders.get(run)

    def _find_others(self) -> None:
        found: dict[str, Path] = {}
        for folder in self.folders():
            try:
                for run in self.read_other(folder, views.open_runs):
                    found[run] = folder
            except (StoreError, DatabaseError, OSError):  # of a newer version, damaged or just deleted: show the others
                continue
        self._folders = found
