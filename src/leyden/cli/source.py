"""Opens the runs that a command reads: on a server, or in the stores below a home folder without a server."""

import argparse
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection

from leyden.episodes import Episode
from leyden.records import Reward, Run, StepCredits
from leyden.remote import Remote, RemoteError, read_key
from leyden.server.options import ServeOptions
from leyden.store import queries, views
from leyden.store.database import Database
from leyden.store.errors import StoreInUse, StoreUnusable
from leyden.store.store import Store
from leyden.views import RolloutListing, RolloutQuery, RunCard, Series
from leyden.wire import ListedRollout, Recorded, RolloutDetail, RunSummary

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

    def _read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._database.reader.begin() as connection:
            return query(connection, *args, **kwargs)

    async def runs(self) -> list[RunSummary]:
        """Return the counts and mean reward of every run."""
        return self._read(lambda reader: [queries.summarise_run(reader, run) for run in queries.list_run_ids(reader)])

    async def run(self, run: str) -> Run:
        """Return a run with its configuration."""
        return self._read(queries.get_run, run)

    async def summary(self, run: str) -> RunSummary:
        """Return the counts and mean reward of a run."""
        return self._read(queries.summarise_run, run)

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[ListedRollout]:
        """List rollouts in the order in which they were queued."""
        return self._read(queries.list_rollouts, run, after=after, limit=limit)

    async def search(self, run: str, query: RolloutQuery) -> RolloutListing:
        """Return a page of the rollouts that match a query, and how many match."""
        return self._read(views.search_rollouts, run, query)

    async def cards(self) -> list[RunCard]:
        """Return state, step and reward of every run."""
        return [await self.card(run) for run in self._read(views.open_runs)]

    async def card(self, run: str) -> RunCard:
        """Return state, step and reward of a run."""
        return self._read(views.run_card, run, time.time())

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


class OpenedRuns(StoredRuns):
    """Exclusive access to a store, with which rewards can be added and runs deleted."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.database)
        self._store = store

    async def record_rewards(self, run: str, attempt: str, rewards: Sequence[Reward]) -> Recorded:
        """Add rewards to an attempt that has ended."""
        return Recorded(await self._store.record_rewards(run, attempt, rewards, rescoring=True))

    async def delete_run(self, run: str) -> None:
        """Delete a run with everything recorded for it."""
        await self._store.delete_run(run)


def add_source(command: argparse.ArgumentParser) -> None:
    """Add the arguments that select a server or store."""
    command.add_argument(
        "--server", metavar="URL", default=os.environ.get("LEYDEN_URL"), help="read from a server (or set LEYDEN_URL)"
    )
    command.add_argument(
        "--key", default=os.environ.get("LEYDEN_KEY"), help="the key for it (or set LEYDEN_KEY; default: admin.key)"
    )
    command.add_argument(
        "--store", metavar="URL", help="read from this database (default: leyden.db in the home folder)"
    )


async def all_runs(options: argparse.Namespace) -> list[tuple[RunSummary, RunCard | None]]:
    """List all runs, the oldest first. A server without keys gives cards to nobody."""
    if options.server:
        async with _remote(options) as remote:
            found, cards = await remote.runs(), dict[str, RunCard]()
            with suppress(RemoteError):
                cards = {card.id: card for card in await remote.cards()}
            return [(summary, cards.get(summary.id)) for summary in found]
    with _stores(options) as stores:
        listed: list[tuple[RunSummary, RunCard | None]] = []
        for store in stores:
            by_id = {card.id: card for card in await store.cards()}
            listed += [(summary, by_id.get(summary.id)) for summary in await store.runs()]
    return sorted(listed, key=lambda one: one[0].created)


@asynccontextmanager
async def open_source(options: argparse.Namespace, run: str) -> AsyncIterator[RunSource]:
    """Open a run for reading."""
    if options.server:
        async with _remote(options) as remote:
            yield remote
        return
    with _stores(options) as stores:
        holding = [store for store in stores if run in {summary.id for summary in await store.runs()}]
        yield (holding or stores)[0]  # a store without the run raises NotFound


@asynccontextmanager
async def open_writable(options: argparse.Namespace, run: str) -> AsyncIterator[OpenedRuns | Remote]:
    """Open a run for reading and adding rewards: its store, or the server that has the store open."""
    if options.server:
        async with _remote(options) as remote:
            yield remote
        return
    async with open_source(options, run) as found:
        assert isinstance(found, StoredRuns)
        await found.run(run)
        location = found.location
    try:
        store = Store(location)
    except StoreInUse as refused:
        url = Path(location).parent / "url"
        if not url.exists():
            raise StoreUnusable(f"{refused}, or name it with --server") from refused
        async with Remote(url.read_text().strip(), read_key(url.parent / "admin.key")) as remote:
            yield remote
        return
    try:
        yield OpenedRuns(await store.start())
    finally:
        await store.close()


async def delete_stored(options: argparse.Namespace, run: str) -> None:
    """Delete a run on a server, or in a store that no server has open."""
    async with open_writable(options, run) as found:
        await found.delete_run(run)


def _remote(options: argparse.Namespace) -> Remote:
    key_file = options.home / "admin.key"
    return Remote(options.server, options.key or (read_key(key_file) if key_file.exists() else None))


@contextmanager
def _stores(options: argparse.Namespace) -> Iterator[list[StoredRuns]]:
    """Open the server's store and those of runs trained in the home folder; raise if there is none."""
    common = ServeOptions(options.home, store=options.store).location
    own = [] if options.store else sorted(str(path) for path in options.home.glob("*/leyden.db"))
    with ExitStack() as stack:
        stores = []
        for location in own if own and not Path(common).exists() else [common, *own]:
            database = Database(location, readonly=True)
            stack.callback(database.close)
            stores.append(StoredRuns(database))
        yield stores
