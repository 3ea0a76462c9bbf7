"""Opens the runs that a command reads: on a server, or in the stores below a home folder without a server."""

import argparse
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from msgspec import Struct

from leyden.api.client import Remote, RemoteError, read_key
from leyden.api.fleet import Fleet, join_fleets
from leyden.api.views import RunCard, Series
from leyden.api.wire import Recorded, RunSummary
from leyden.cli.arguments import add_store
from leyden.cli.policies import policy_series
from leyden.records import Reward
from leyden.runs.run_checkpoints import find_run_folder
from leyden.runs.stored_runs import RunSource, StoredRuns, no_run, open_run, open_stores
from leyden.store.errors import StoreInUse, StoreUnusable
from leyden.store.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class OpenedRuns(StoredRuns):
    """Exclusive access to a store, with which rewards can be added and runs deleted."""

    def __init__(self, store: Store, read: StoredRuns) -> None:
        super().__init__(store.database, read.folder, read.taken)
        self._store = store

    async def record_rewards(self, run: str, attempt: str, rewards: Sequence[Reward]) -> Recorded:
        """Add rewards to an attempt that has ended."""
        return Recorded(await self._store.record_rewards(self.id_of(run), attempt, rewards, rescoring=True))

    async def delete_run(self, run: str) -> None:
        """Delete a run with everything recorded for it."""
        await self._store.delete_run(self.id_of(run))


def add_source(command: argparse.ArgumentParser) -> None:
    """Add the arguments that select a server or store."""
    command.add_argument(
        "--server", metavar="URL", default=os.environ.get("LEYDEN_URL"), help="read from a server (or set LEYDEN_URL)"
    )
    command.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="a file with the key for it (or set LEYDEN_KEY; default: admin.key in the home folder)",
    )
    add_store(command, "read from this database (or set LEYDEN_STORE; default: leyden.db in the home folder)")


def local_folder(options: argparse.Namespace) -> Path | None:
    """Return the folder of the run that a command names; None if it has none, or none that is here."""
    return None if options.server or options.store else find_run_folder(options.home, options.name)


class ListedRun(Struct, frozen=True):
    """A run of `leyden runs`."""

    summary: RunSummary
    card: RunCard | None
    folder: Path | None = None
    """The folder of the run, if it has one and that is here."""


async def all_runs(options: argparse.Namespace) -> list[ListedRun]:
    """List all runs, the oldest first. A server that runs without keys refuses cards, so there are none."""
    if options.server:
        async with _remote(options) as remote:
            found, cards = await remote.list_runs(), dict[str, RunCard]()
            with suppress(RemoteError):
                cards = {card.id: card for card in await remote.overview()}
            return [ListedRun(summary, cards.get(summary.id)) for summary in found]
    with open_stores(options.home, options.store) as stores:
        listed: list[ListedRun] = []
        for store in stores:
            named = store.named
            for run in named.ids:
                folder = store.folder if run == named.own else None
                listed.append(ListedRun(await store.summarise_run(run), await store.run_card(run), folder))
    return sorted(listed, key=lambda one: one.summary.created)


@asynccontextmanager
async def open_source(options: argparse.Namespace, run: str) -> AsyncIterator[RunSource]:
    """Open a run for reading."""
    if options.server:
        async with _remote_run(options, run) as remote:
            yield remote
        return
    with open_run(options.home, run, options.store) as store:
        yield store


@asynccontextmanager
async def open_writable(options: argparse.Namespace, run: str) -> AsyncIterator[OpenedRuns | Remote]:
    """Open a run for reading, adding rewards and deletion: its store, or the server that has the store open."""
    if options.server:
        async with _remote_run(options, run) as remote:
            yield remote
        return
    async with open_source(options, run) as found:
        assert isinstance(found, StoredRuns)
        location, id = found.location, found.id_of(run)
    try:
        store = Store(location)
    except StoreInUse as refused:
        url = Path(location).parent / "url"
        if not url.exists() or id != run:
            raise StoreUnusable(f"{refused}, or name it with --server, where the run is called {id}") from refused
        async with Remote(url.read_text().strip(), read_key(url.parent / "admin.key")) as remote:
            yield remote
        return
    try:
        yield OpenedRuns(await store.start(), found)
    finally:
        await store.close()


class Watched:
    """All runs of a server, or of the stores below a home folder, as `leyden top` shows them."""

    def __init__(self, sources: Sequence[RunSource]) -> None:
        self._sources = sources
        self._source_of: dict[str, RunSource] = {}

    async def cards(self) -> list[RunCard]:
        """Return state, step and reward of every run, newest first."""
        found: list[RunCard] = []
        for source in self._sources:
            cards = await source.overview()
            self._source_of |= dict.fromkeys((card.id for card in cards), source)
            found += cards
        return sorted(found, key=lambda card: -card.created)

    async def series(self, card: RunCard, names: Sequence[str]) -> dict[str, dict[str, Series]]:
        """Return metrics, by policy, of a run that `cards` has returned."""
        return await policy_series(self._source_of[card.id], card.id, card, names)

    async def fleet(self) -> Fleet | None:
        """Return workers, queues and engines of all stores; None if there is no store."""
        found = [await source.fleet() for source in self._sources]
        return join_fleets(found[0], found[1:]) if found else None


@asynccontextmanager
async def open_watched(options: argparse.Namespace) -> AsyncIterator[Watched]:
    """Open all runs for watching."""
    if options.server:
        async with _remote(options) as remote:
            yield Watched([remote])
        return
    with open_stores(options.home, options.store) as stores:
        yield Watched(stores)


@asynccontextmanager
async def _remote_run(options: argparse.Namespace, run: str) -> AsyncIterator[Remote]:
    """Connect to a server for a run; if it has none of that name, raise `NotFound` with the runs that it has."""
    async with _remote(options) as remote:
        try:
            await remote.get_run(run)
        except RemoteError as error:
            if error.status != 404:
                raise
            raise no_run(run, [one.id for one in await remote.list_runs()], f" on {options.server}") from error
        yield remote


def _remote(options: argparse.Namespace) -> Remote:
    """Connect to a server, with a key that is in no command line: other users of a machine can read those."""
    if options.key_file is not None:
        return Remote(options.server, read_key(options.key_file))
    admin_key = options.home / "admin.key"
    return Remote(options.server, os.environ.get("LEYDEN_KEY") or (read_key(admin_key) if admin_key.exists() else None))
