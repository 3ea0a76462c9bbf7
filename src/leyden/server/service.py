"""What the routes work with: the store, the leases in force, the keys, and how the server was set up."""

from collections.abc import Callable
from typing import Self

from msgspec import Struct

from leyden import defaults
from leyden.server.gateway.gateway import Gateway
from leyden.server.keys import Keyring
from leyden.server.leases import ActiveLeases
from leyden.server.limits import Limiter
from leyden.server.telemetry import Telemetry
from leyden.store import queries
from leyden.store.store import Store


class ServerSettings(Struct, frozen=True):
    """How a server was set up."""

    url: str
    """Where workers and agents reach it, which need not be where it listens."""
    keyless: bool = False
    """Whether a caller without a key may do everything; only ever on loopback."""
    max_body: int = defaults.MAX_BODY_MB * 2**20
    """Bytes in a request, packed or unpacked."""


class ServerContext:
    """One server's parts."""

    def __init__(self, store: Store, leases: ActiveLeases, keyring: Keyring, settings: ServerSettings) -> None:
        self.store = store
        self.leases = leases
        self.keyring = keyring
        self.settings = settings
        self.gateway: Gateway | None = None
        """Where models are served; None where this server only keeps the record."""
        self.limiter = Limiter()
        self.telemetry = Telemetry(store, leases, lambda: self.gateway.recorder if self.gateway else None)

    @classmethod
    async def start(cls, store: Store, keyring: Keyring, settings: ServerSettings) -> Self:
        """Open for business over a store that has been started."""
        leases = ActiveLeases(await store.read(queries.alive))
        service = cls(store, leases, keyring, settings)
        hear: Callable[..., None]
        for hear in (leases.hear, service.telemetry.hear):
            store.changes.subscribe(hear)
        return service
