"""Reads runs without a server, from the stores below a home folder. `runs/run_names.py` says what their names mean."""

import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace
from sqlalchemy import Connection
from sqlalchemy.exc import DatabaseError

from leyden.api.client import Remote
from leyden.api.fleet import Fleet, add_engines
from leyden.api.views import Evaluation, EvaluationQuery, RunCard
from leyden.api.wire import RunSummary
from leyden.config.schema import STORE_VARIABLE
from leyden.estimates import PairedDifference
from leyden.records import Run
from leyden.runs.run_names import STORE_NAME, FolderRuns, denied, may_have, name_leases, name_runs, store_folders
from leyden.store.database import Database
from leyden.store.errors import NotFound, StoreUnusable
from leyden.store.files.engine_file import read_report
from leyden.store.files.run_lock import count_interrupted, is_run_held
from leyden.store.read import evaluations, fleet_queries, queries, rollout_search, task_listing, views

P = ParamSpec("P")
T = TypeVar("T")


def _reading(
    query: Callable[Concatenate[Connection, str, P], T],
) -> Callable[Concatenate["StoredRuns", str, P], Coroutine[Any, Any, T]]:
    """Return the method that answers an endpoint of the control API with a query of the store."""

    async def read(stored: "StoredRuns", run: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return stored._read(query, stored.id_of(run), *args, **kwargs)

    return read


class StoredRuns:
    """Read-only access to the runs of a store, by their names. A server may write to it at the same time.

    Records within a run (rollouts, attempts) are as they were recorded, with the id that the run has in the store.
    """

    def __init__(self, database: Database, folder: Path | None = None, taken: Collection[str] = ()) -> None:
        self._database, self.folder, self.taken = database, folder, taken

    @property
    def named(self) -> FolderRuns:
        """The names of the runs that the store has now, oldest first."""
        return name_runs(self.folder, self._read(queries.list_run_ids), self.taken)

    def id_of(self, run: str) -> str:
        """Return the id that a run has in this store. Raises `NotFound` if the store has no run of this name."""
        try:
            return self.named.ids[run]
        except KeyError:
            raise NotFound(f"no run {run!r}") from None

    @property
    def location(self) -> str:
        """Path or URL of the database."""
        url = self._database.url
        return url.database or "" if self._database.dialect == "sqlite" else url.render_as_string(hide_password=False)

    @property
    def held(self) -> bool | None:
        """Whether a process works on the run of this store; None if that is not known, as for a server's store."""
        return is_run_held(Path(self.location).parent) if self._database.dialect == "sqlite" else None

    def _read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._database.reader.begin() as connection:
            return query(connection, *args, **kwargs)

    list_rollouts = _reading(queries.list_rollouts)
    search_rollouts = _reading(rollout_search.search_rollouts)
    list_tasks = _reading(task_listing.list_tasks)
    run_series = _reading(views.read_series)
    get_rollout = _reading(queries.get_rollout)
    get_episode = _reading(queries.get_episode)
    rollout_credits = _reading(queries.rollout_credits)

    async def get_run(self, run: str) -> Run:
        """Return a run with its configuration."""
        return replace(self._read(queries.get_run, self.id_of(run)), id=run)

    async def read_evaluation(self, run: str, query: EvaluationQuery) -> Evaluation:
        """Return the rewards of an evaluation of a run."""
        return replace(self._read(evaluations.read_evaluation, self.id_of(run), query), run=run)

    async def summarise_run(self, run: str) -> RunSummary:
        """Return the counts and mean reward of a run."""
        found = self._read(queries.summarise_run, self.id_of(run))
        return replace(found, id=run, rollouts=count_interrupted(found.rollouts, self.held))

    async def overview(self) -> list[RunCard]:
        """Return state, step and reward of every run."""
        return [await self.run_card(run) for run in self.named.ids]

    async def run_card(self, run: str) -> RunCard:
        """Return state, step and reward of a run."""
        return replace(self._read(views.run_card, self.id_of(run), time.time(), held=self.held), id=run)

    async def fleet(self) -> Fleet:
        """Return workers and queue, and the engines that the server of the store's folder reports."""
        found = name_leases(self._read(fleet_queries.read_fleet, time.time(), self.held), self.named)
        report = read_report(Path(self.location).parent) if self._database.dialect == "sqlite" else None
        return found if report is None else add_engines(found, [report])


RunSource = StoredRuns | Remote
"""Read access to runs. Both have the methods of the control API that commands use."""


@contextmanager
def open_stores(home: Path, location: str | None = None) -> Iterator[list[StoredRuns]]:
    """Open the store of a home folder and those of the folders in it, or the one at `location`."""
    with ExitStack() as stack:
        common = stack.enter_context(_common_store(home, location))
        taken = _ids(common)
        folders = store_folders(home) if location is None else []
        if common is None and not folders:
            raise StoreUnusable(
                denied(home) or f"no runs in {home}: `leyden train` writes them there; --home names another folder"
            )
        own = [stack.enter_context(_folder_store(folder, taken)) for folder in folders]
        yield own if common is None else [common, *own]


@contextmanager
def open_run(home: Path, run: str, location: str | None = None) -> Iterator[StoredRuns]:
    """Open the store that has the run of a name; if none has, raise `NotFound` with the runs that there are."""
    with ExitStack() as stack:
        common = stack.enter_context(_common_store(home, location))
        taken = _ids(common)
        if common is not None and run in taken:
            yield common
            return
        for folder in may_have(store_folders(home) if location is None else [], run):
            found = stack.enter_context(_folder_store(folder, taken))
            if run in found.named.ids:
                yield found
                return
        if (refusal := denied(home, run)) is not None:
            raise StoreUnusable(refusal)
        with open_stores(home, location) as stores:
            known = sorted(name for store in stores for name in store.named.ids)
    raise no_run(run, known)


def no_run(run: str, known: Sequence[str], place: str = "") -> NotFound:
    """Return the error for a name that no run has, with the names that there are."""
    there = f"there are {', '.join(known[:20])}" if known else "there are none"
    return NotFound(f"no run {run!r}{place}: {there}")


async def compare_runs(
    home: Path, first: str, second: str, steps: tuple[int | None, int | None] = (None, None)
) -> PairedDifference:
    """Compare the last evaluations of two runs in a home folder, or those of the steps given."""
    found = []
    for run, step in zip((first, second), steps, strict=True):
        with open_run(home, run) as store:
            found.append(await store.read_evaluation(run, EvaluationQuery(step)))
    return evaluations.compare_evaluations(*found).result


def name_of_folder(folder: Path, taken: Collection[str]) -> str | None:
    """Return the name of the run whose folder this is; None if there is none, or its store cannot be read."""
    with suppress(StoreUnusable), _folder_store(folder, taken) as found:
        return found.named.own
    return None


def has_only_others(folder: Path) -> bool:
    """Whether a folder's store can be read and has runs, but none that is called by the folder's name."""
    with suppress(StoreUnusable, DatabaseError), _folder_store(folder, ()) as found:
        return bool(found.named.ids) and found.named.own is None
    return False


def common_ids(home: Path) -> Collection[str]:
    """Return the ids of the runs in the store of a home folder, or in the one that `LEYDEN_STORE` names instead."""
    with _common_store(home, os.environ.get(STORE_VARIABLE) or None) as common:
        return _ids(common)


@contextmanager
def _common_store(home: Path, location: str | None = None) -> Iterator[StoredRuns | None]:
    """Open the store of a home folder, if it has one, or the one at `location`."""
    if location is None and not (home / STORE_NAME).exists():
        yield None
        return
    with closing(Database(location or home / STORE_NAME, readonly=True)) as database:
        yield StoredRuns(database)


@contextmanager
def _folder_store(folder: Path, taken: Collection[str]) -> Iterator[StoredRuns]:
    with closing(Database(folder / STORE_NAME, readonly=True)) as database:
        yield StoredRuns(database, folder, taken)


def _ids(store: StoredRuns | None) -> Collection[str]:
    return () if store is None else store.named.ids
