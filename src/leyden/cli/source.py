"""Where `runs` and `show` read from: a server, or the store of a home folder, which needs no server to be running."""

import argparse
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection

from leyden.records import Episode, Rollout, Run
from leyden.remote import Remote
from leyden.server.serve import ServeOptions
from leyden.server.store import reading
from leyden.server.store.database import Database
from leyden.wire import RolloutDetail, RunSummary

P = ParamSpec("P")
T = TypeVar("T")


class Source(Protocol):
    """What can be read."""

    async def runs(self) -> list[RunSummary]:
        """Every run in numbers."""

    async def run(self, run: str) -> Run:
        """A run with its configuration."""

    async def summary(self, run: str) -> RunSummary:
        """A run in numbers."""

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[Rollout]:
        """Rollouts in the order in which they were queued."""

    async def rollout(self, run: str, rollout: str) -> RolloutDetail:
        """A rollout with its task and attempts."""

    async def episode(self, run: str, attempt: str) -> Episode:
        """All that an attempt left behind."""


class OnDisk:
    """The store of a home folder, read only; a server may be writing to it meanwhile."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def _read(self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._database.reader.begin() as connection:
            return question(connection, *args, **kwargs)

    async def runs(self) -> list[RunSummary]:
        """Every run in numbers."""
        return self._read(lambda look: [reading.summary(look, run) for run in reading.run_ids(look)])

    async def run(self, run: str) -> Run:
        """A run with its configuration."""
        return self._read(reading.run, run)

    async def summary(self, run: str) -> RunSummary:
        """A run in numbers."""
        return self._read(reading.summary, run)

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[Rollout]:
        """Rollouts in the order in which they were queued."""
        return self._read(reading.rollout_list, run, after=after, limit=limit)

    async def rollout(self, run: str, rollout: str) -> RolloutDetail:
        """A rollout with its task and attempts."""
        return self._read(reading.rollout_detail, run, rollout)

    async def episode(self, run: str, attempt: str) -> Episode:
        """All that an attempt left behind."""
        return self._read(reading.episode, run, attempt)


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


@asynccontextmanager
async def source(options: argparse.Namespace) -> AsyncIterator[Source]:
    """Open what the arguments name."""
    if options.server:
        key_file = options.home / "admin.key"
        key = options.key or (key_file.read_text().strip() if key_file.exists() else None)
        async with Remote(options.server, key) as remote:
            yield remote
        return
    database = Database(ServeOptions(options.home, store=options.store).location, readonly=True)
    try:
        yield OnDisk(database)
    finally:
        database.close()
