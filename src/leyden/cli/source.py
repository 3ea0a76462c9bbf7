"""Where commands find a run: on a server, or in the stores beneath a home folder, which need no server running."""

import argparse
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection

from leyden.episodes import Episode
from leyden.records import Reward, Run
from leyden.remote import Remote
from leyden.server.options import ServeOptions
from leyden.store import queries
from leyden.store.database import Database
from leyden.store.errors import StoreInUse, StoreUnusable
from leyden.store.store import Store
from leyden.wire import ListedRollout, Recorded, RolloutDetail, RunSummary

P = ParamSpec("P")
T = TypeVar("T")


class RunSource(Protocol):
    """What can be read."""

    async def run(self, run: str) -> Run:
        """A run with its configuration."""

    async def summary(self, run: str) -> RunSummary:
        """A run in numbers."""

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[ListedRollout]:
        """Rollouts in the order in which they were queued."""

    async def rollout(self, run: str, rollout: str) -> RolloutDetail:
        """A rollout with its task and attempts."""

    async def episode(self, run: str, attempt: str) -> Episode:
        """All that an attempt left behind."""


class StoredRuns:
    """The store of a home folder, read only; a server may be writing to it meanwhile."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def location(self) -> str:
        """Where it is."""
        url = self._database.url
        return url.database or "" if self._database.dialect == "sqlite" else url.render_as_string(hide_password=False)

    def _read(self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._database.reader.begin() as connection:
            return question(connection, *args, **kwargs)

    async def runs(self) -> list[RunSummary]:
        """Every run in numbers."""
        return self._read(lambda look: [queries.summary(look, run) for run in queries.run_ids(look)])

    async def run(self, run: str) -> Run:
        """A run with its configuration."""
        return self._read(queries.run, run)

    async def summary(self, run: str) -> RunSummary:
        """A run in numbers."""
        return self._read(queries.summary, run)

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[ListedRollout]:
        """Rollouts in the order in which they were queued."""
        return self._read(queries.rollout_list, run, after=after, limit=limit)

    async def rollout(self, run: str, rollout: str) -> RolloutDetail:
        """A rollout with its task and attempts."""
        return self._read(queries.rollout_detail, run, rollout)

    async def episode(self, run: str, attempt: str) -> Episode:
        """All that an attempt left behind."""
        return self._read(queries.episode, run, attempt)


class OpenedRuns(StoredRuns):
    """The store of a home folder, in nobody else's hands meanwhile, to which rewards can be added."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.database)
        self._store = store

    async def record_rewards(self, run: str, attempt: str, rewards: Sequence[Reward]) -> Recorded:
        """Add rewards to an attempt that is over."""
        return Recorded(await self._store.record_rewards(run, attempt, rewards, rescoring=True))


def add_source(command: argparse.ArgumentParser) -> None:
    """Add the arguments that say where to read."""
    command.add_argument(
        "--server", metavar="URL", default=os.environ.get("LEYDEN_URL"), help="read from a server (or set LEYDEN_URL)"
    )
    command.add_argument(
        "--key", default=os.environ.get("LEYDEN_KEY"), help="the key for it (or set LEYDEN_KEY; default: admin.key)"
    )
    command.add_argument(
        "--store", metavar="URL", help="read from this database (default: leyden.db in the home folder)"
    )


async def every_run(options: argparse.Namespace) -> list[RunSummary]:
    """Every run there is, the oldest first."""
    if options.server:
        async with _remote(options) as remote:
            return await remote.runs()
    with _stores(options) as stores:
        found = [summary for store in stores for summary in await store.runs()]
    return sorted(found, key=lambda summary: summary.created)


@asynccontextmanager
async def source(options: argparse.Namespace, run: str) -> AsyncIterator[RunSource]:
    """What there is to read of a run."""
    if options.server:
        async with _remote(options) as remote:
            yield remote
        return
    with _stores(options) as stores:
        holding = [store for store in stores if run in {summary.id for summary in await store.runs()}]
        yield (holding or stores)[0]  # one that has it not says so


@asynccontextmanager
async def archive(options: argparse.Namespace, run: str) -> AsyncIterator[OpenedRuns | Remote]:
    """What there is of a run, to read and to add to: its store, or the server that has it open."""
    if options.server:
        async with _remote(options) as remote:
            yield remote
        return
    async with source(options, run) as found:
        assert isinstance(found, StoredRuns)
        await found.run(run)
        location = found.location
    try:
        store = Store(location)
    except StoreInUse as refused:
        url = Path(location).parent / "url"
        if not url.exists():
            raise StoreUnusable(f"{refused}, or name it with --server") from refused
        async with Remote(url.read_text().strip(), (url.parent / "admin.key").read_text().strip()) as remote:
            yield remote
        return
    try:
        yield OpenedRuns(await store.start())
    finally:
        await store.close()


def _remote(options: argparse.Namespace) -> Remote:
    key_file = options.home / "admin.key"
    return Remote(options.server, options.key or (key_file.read_text().strip() if key_file.exists() else None))


@contextmanager
def _stores(options: argparse.Namespace) -> Iterator[list[StoredRuns]]:
    """A server's store, and those of the runs that were trained in the folder; where there is none, an error."""
    common = ServeOptions(options.home, store=options.store).location
    own = [] if options.store else sorted(str(path) for path in options.home.glob("*/leyden.db"))
    with ExitStack() as stack:
        stores = []
        for location in own if own and not Path(common).exists() else [common, *own]:
            database = Database(location, readonly=True)
            stack.callback(database.close)
            stores.append(StoredRuns(database))
        yield stores
