"""Reads runs without a server, from the stores below a home folder."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from msgspec.structs import replace
from sqlalchemy import Connection

from leyden.episodes import Episode
from leyden.records import Run, StepCredits
from leyden.store import fleet_queries, queries, rollout_search, views
from leyden.store.database import Database
from leyden.store.engine_file import read_report
from leyden.store.errors import NotFound, StoreUnusable
from leyden.store.run_lock import count_interrupted, is_run_held
from leyden.views import Fleet, RolloutListing, RolloutQuery, RunCard, Series, add_engines
from leyden.wire import ListedRollout, RolloutDetail, RunSummary

P = ParamSpec("P")
T = TypeVar("T")


class RunSource(Protocol):
    """Read access to runs."""

    async def run(self, run: str) -> Run:
        """Return a run with its configuration."""

    async def summary(self, run: str) -> RunSummary:
        """Return the counts and mean reward of a run."""

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[ListedRollout]:
        """List rollouts in the order in which they were queued."""

    async def search(self, run: str, query: RolloutQuery) -> RolloutListing:
        """Return a page of the rollouts that match a query, and how many match."""

    async def card(self, run: str) -> RunCard:
        """Return state, step and reward of a run."""

    async def series(self, run: str, names: Sequence[str], points: int) -> dict[str, Series]:
        """Return metrics by step, each in at most so many points."""

    async def rollout(self, run: str, rollout: str) -> RolloutDetail:
        """Return a rollout with its task and attempts."""

    async def episode(self, run: str, attempt: str) -> Episode:
        """Return everything recorded for an attempt."""

    async def credits(self, run: str, rollout: str) -> list[StepCredits]:
        """Return what training computed for each call of a rollout, or why it was left out."""


class StoredRuns:
    """Read-only access to a store. A server may write to it at the same time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def location(self) -> str:
        """Path or URL of the database."""
        url = self._database.url
        return url.database or "" if self._database.dialect == "sqlite" else url.render_as_string(hide_password=False)

    @property
    def held(self) -> bool | None:
        """Whether a process works on the run of this store; None where that is not known, as for a server's store."""
        return is_run_held(Path(self.location).parent) if self._database.dialect == "sqlite" else None

    def _read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._database.reader.begin() as connection:
            return query(connection, *args, **kwargs)

    async def runs(self) -> list[RunSummary]:
        """Return the counts and mean reward of every run."""
        return [await self.summary(run) for run in self._read(queries.list_run_ids)]

    async def run(self, run: str) -> Run:
        """Return a run with its configuration."""
        return self._read(queries.get_run, run)

    async def summary(self, run: str) -> RunSummary:
        """Return the counts and mean reward of a run."""
        found = self._read(queries.summarise_run, run)
        return replace(found, rollouts=count_interrupted(found.rollouts, self.held))

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[ListedRollout]:
        """List rollouts in the order in which they were queued."""
        return self._read(queries.list_rollouts, run, after=after, limit=limit)

    async def search(self, run: str, query: RolloutQuery) -> RolloutListing:
        """Return a page of the rollouts that match a query, and how many match."""
        return self._read(rollout_search.search_rollouts, run, query)

    async def cards(self) -> list[RunCard]:
        """Return state, step and reward of every run."""
        return [await self.card(run) for run in self._read(views.open_runs)]

    async def card(self, run: str) -> RunCard:
        """Return state, step and reward of a run."""
        return self._read(views.run_card, run, time.time(), held=self.held)

    async def fleet(self) -> Fleet:
        """Return workers and queue, and the engines that the server of the store's folder reports."""
        found = self._read(fleet_queries.read_fleet, time.time(), self.held)
        report = read_report(Path(self.location).parent) if self._database.dialect == "sqlite" else None
        return found if report is None else add_engines(found, [report])

    async def series(self, run: str, names: Sequence[str], points: int) -> dict[str, Series]:
        """Return metrics by step, each in at most so many points."""
        return self._read(views.read_series, run, names, points)

    async def rollout(self, run: str, rollout: str) -> RolloutDetail:
        """Return a rollout with its task and attempts."""
        return self._read(queries.get_rollout, run, rollout)

    async def episode(self, run: str, attempt: str) -> Episode:
        """Return everything recorded for an attempt."""
        return self._read(queries.get_episode, run, attempt)

    async def credits(self, run: str, rollout: str) -> list[StepCredits]:
        """Return what training computed for each call of a rollout, or why it was left out."""
        return self._read(queries.rollout_credits, run, rollout)


@contextmanager
def open_stores(home: Path, location: str | None = None) -> Iterator[list[StoredRuns]]:
    """Open the store of a server and those of runs trained in its home folder, or the one at `location`."""
    common = location or str(home / "leyden.db")
    own = [] if location else sorted(str(path) for path in home.glob("*/leyden.db"))
    if location is None and not own and not Path(common).exists():
        raise StoreUnusable(f"no runs in {home}: `leyden train` writes them there; --home names another folder")
    with ExitStack() as stack:
        stores = []
        for found in own if own and not Path(common).exists() else [common, *own]:
            database = Database(found, readonly=True)
            stack.callback(database.close)
            stores.append(StoredRuns(database))
        yield stores


async def store_with(stores: Sequence[StoredRuns], run: str) -> StoredRuns:
    """Return the store that has a run; if none has, raise `NotFound` with the runs that there are."""
    known: list[str] = []
    for store in stores:
        found = [summary.id for summary in await store.runs()]
        if run in found:
            return store
        known += found
    there = f"there are {', '.join(sorted(known)[:20])}" if known else "there are none"
    raise NotFound(f"no run {run!r}: {there}")
