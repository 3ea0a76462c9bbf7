"""The objects that handlers work with: the store, the active leases, the keys and the server's options."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar

from leyden.process.usage import ResourceUse
from leyden.server.control.keys import ActiveLeases, Keyring
from leyden.server.control.telemetry import Telemetry
from leyden.server.dashboard.run_stores import RunStores
from leyden.server.dashboard.store_polling import StorePolling
from leyden.server.gateway.gateway import Gateway
from leyden.server.http.limits import BodyBudget, Limiter, limits_for
from leyden.server.options import ServeOptions
from leyden.store.read import queries
from leyden.store.store import Store

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 2
_WORKERS = 500


class Offload:
    """Runs CPU-bound work in threads, so that the event loop stays free for others.

    Work of one key runs one piece after another: a key that sends much delays itself and not the rest.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "leyden-offload")
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    async def run(self, key: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread, after the earlier ones of the same key."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]


class ServerContext:
    """The parts of one server."""

    def __init__(self, store: Store, leases: ActiveLeases, keyring: Keyring, options: ServeOptions, url: str) -> None:
        """`url` is for workers and agents; it need not be the address that the server listens on."""
        self.store, self.leases, self.keyring, self.options, self.url = store, leases, keyring, options, url
        self.gateway: Gateway | None = None
        """None on a server that serves no model."""
        self.ended_runs: set[str] = set()
        """Runs that queue nothing more: their workers are told to end."""
        self.worker_use: dict[str, ResourceUse] = {}
        """What the workers that asked for rollouts last use."""
        self.run_stores = RunStores(store, options.beside or options.home, options.home)
        self.store_polling = StorePolling(self.run_stores)
        self.limiter = Limiter(limits_for(options.server.concurrent_calls))
        self.bodies = BodyBudget(options.max_body)
        self.offload = Offload()
        self.telemetry = Telemetry(store, leases, lambda: self.gateway.recorder if self.gateway else None)

    @classmethod
    async def start(cls, store: Store, keyring: Keyring, options: ServeOptions, url: str) -> Self:
        """Build the context over a started store."""
        leases = ActiveLeases(await store.read(queries.active_attempts))
        service = cls(store, leases, keyring, options, url)
        store.notifications.subscribe(leases.on_event)
        store.notifications.subscribe(service.telemetry.on_event)
        return service

    def note_use(self, worker: str, use: ResourceUse) -> None:
        """Keep what a worker uses, of the last workers."""
        self.worker_use.pop(worker, None)
        self.worker_use[worker] = use
        if len(self.worker_use) > _WORKERS:
            del self.worker_use[next(iter(self.worker_use))]

    async def close(self) -> None:
        """Close what was opened for requests. The store stays open."""
        self.run_stores.close()
        if self.gateway is not None:
            await self.gateway.close()
