"""Finds the store of a run that pages show: this server's, or that of a folder in its home folder.

`runs/run_names.py` says what the name of a run means. The stores of other runs are only read. A process that trains
may write to them at the same time.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DatabaseError

from leyden.runs.run_names import STORE_NAME, FolderRuns, may_have, name_runs, store_folders
from leyden.store.database import Database
from leyden.store.errors import StoreClosed, StoreError
from leyden.store.files.run_lock import is_run_held
from leyden.store.read import views
from leyden.store.read.queries import list_run_ids
from leyden.store.read.run_digest import RunDigest, digest_run
from leyden.store.store import Store

P = ParamSpec("P")
T = TypeVar("T")


_ACTIVE_S = 600.0
_THREADS = 4
"""For pages only: opening large stores takes long, and must not keep model calls from a thread."""
StoreRun = tuple[Path | None, str]
"""The folder of a store (None: this server's) and a run in it."""
Counts = dict[tuple[str, str], int]
"""The number of new events by run and kind."""
Signature = tuple[tuple[int, int, int], ...]


def signature(folder: Path) -> Signature:
    """Return time, size and inode of a store's files. The write-ahead log changes with every commit.

    Raises `OSError` if the store was deleted.
    """
    found = [(folder / STORE_NAME).stat()]
    with suppress(FileNotFoundError):
        found.append((folder / f"{STORE_NAME}-wal").stat())
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found)


class RunStores:
    """Reads runs of this server and of the folders in `home`, except the one with this server's store."""

    def __init__(self, store: Store, home: Path, own: Path | None = None) -> None:
        self._store, self._home, self._own = store, home, own
        self._digests: dict[StoreRun, tuple[views.NewestEvent, RunDigest]] = {}
        """The totals of runs that pages show, with the newest event that they include."""
        self._digesting: defaultdict[StoreRun, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._opened: dict[Path, tuple[int, Database]] = {}
        """By folder, the inode of the file and the database."""
        self._opening = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(_THREADS, "leyden-runs")

    async def read(
        self, run: str, query: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a query with the id of a run in the store that has it; in this server's if none has."""
        return await self.read_at(await self.find(run), query, *args, **kwargs)

    async def read_at(
        self, at: StoreRun, query: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a query with a run that was found before."""
        folder, id = at
        return await self._read(folder, lambda reader: query(reader, id, *args, **kwargs))

    async def digest(self, at: StoreRun) -> RunDigest:
        """Return the totals of a run. Requests without an event in between share them."""
        folder, id = at
        async with self._digesting[folder, id]:  # one reading at a time: other requests of a store wait for its readers
            newest = await self._read(folder, partial(views.newest_event, run=id))
            last, digest = self._digests.get((folder, id), (None, None))
            if digest is None or last != newest:
                digest = await self._read(folder, partial(digest_run, run=id))
                if newest.seq:  # otherwise no store has the run
                    self._digests[folder, id] = newest, digest
            return digest

    async def runs(self, only: str | None) -> dict[str, StoreRun]:
        """Return where all runs are, by name, oldest first within each store, or one if it exists.

        When all are listed, the totals of runs that were deleted are forgotten.
        """
        own = await self._store.read(list_run_ids)
        others = await self.in_thread(partial(self._name_others, own))
        found = dict[str, StoreRun]((id, (None, id)) for id in own)
        found |= {name: (folder, id) for folder, runs in others.items() for name, id in runs.ids.items()}
        if only is None:
            kept = set(found.values())
            self._digests = {run: digest for run, digest in self._digests.items() if run in kept}
            self._digesting = defaultdict(asyncio.Lock, {run: self._digesting[run] for run in self._digests})
        return {run: at for run, at in found.items() if only in (None, run)}

    async def find(self, run: str) -> StoreRun:
        """Return where the run of a name is: the folder with its store (None: this server's) and its id there.

        A run that no store has is looked for in this server's.
        """
        found = await self._store.read(list_run_ids, run)
        if found:
            return None, run
        # whether FOLDER:ID is a name depends on whether this server has a run FOLDER
        own = await self._store.read(list_run_ids) if ":" in run else ()
        return await self.in_thread(partial(self._find_other, run, own))

    async def name_counts(self, counts: Mapping[Path, Counts]) -> Counts:
        """Return counts of other stores' events by the names of their runs, from those by id."""
        own = await self._store.read(list_run_ids)
        named = await self.in_thread(partial(self._name_others, own, counts))
        return {
            (named[folder].name_of(run), kind): count
            for folder, found in counts.items()
            for (run, kind), count in found.items()
            if folder in named
        }

    def names(self, folder: Path, own: Collection[str]) -> FolderRuns:
        """Return the names of the runs in the store of a folder; `own` are the ids of this server's runs.

        Raises `OSError` or `StoreError` if it cannot be opened.
        """
        return name_runs(folder, self.read_other(folder, list_run_ids), own)

    def folders(self) -> list[Path]:
        """Return the folders of the home that have a store. Stores that were deleted are closed, to free space."""
        found = [folder for folder in store_folders(self._home) if folder != self._own]
        with self._opening:
            for deleted in self._opened.keys() - set(found):
                self._opened.pop(deleted)[1].close()
        return found

    def read_other(self, folder: Path, query: Callable[[Connection], T]) -> T:
        """Run a query in the store of a folder. Raises `OSError` or `StoreError` if it cannot be opened."""
        with self._open(folder).reader.begin() as connection:
            return query(connection)

    def _open(self, folder: Path) -> Database:
        path = folder / STORE_NAME
        with self._opening:  # threads read at the same time, and each store is opened once
            if self._closed:
                raise StoreClosed("the server stops")
            inode = path.stat().st_ino
            if folder in self._opened and self._opened[folder][0] != inode:  # the run was deleted and started again
                self._opened.pop(folder)[1].close()
            if folder not in self._opened:
                self._opened[folder] = inode, Database(str(path), readonly=True)
            return self._opened[folder][1]

    async def read_active(self, query: Callable[[Connection, FolderRuns], T]) -> list[T]:
        """Run a query in each other store that was written to in the last ten minutes, unless its process has ended.

        The query is given the names of the store's runs.
        """
        own = await self._store.read(list_run_ids)

        def read() -> list[T]:
            found = []
            for folder in self.folders():
                with suppress(StoreError, DatabaseError, OSError):  # damaged, of a newer version, or just deleted
                    if (
                        is_run_held(folder) is not False
                        and time.time() - max(modified for modified, _, _ in signature(folder)) / 1e9 < _ACTIVE_S
                    ):
                        runs = self.names(folder, own)
                        with self._open(folder).reader.begin() as connection:
                            found.append(query(connection, runs))
            return found

        return await self.in_thread(read)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work that reads files of other runs, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Close the stores of other runs."""
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

    def _find_other(self, run: str, own: Collection[str]) -> StoreRun:
        for folder in may_have(self.folders(), run):
            with suppress(StoreError, DatabaseError, OSError):  # of a newer version, damaged, or just deleted
                if (id := self.names(folder, own).ids.get(run)) is not None:
                    return folder, id
        return None, run

    def _name_others(self, own: Collection[str], folders: Iterable[Path] | None = None) -> dict[Path, FolderRuns]:
        found: dict[Path, FolderRuns] = {}
        for folder in self.folders() if folders is None else folders:
            with suppress(StoreError, DatabaseError, OSError):  # as above: show the others
                found[folder] = self.names(folder, own)
        return found
