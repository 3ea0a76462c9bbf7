"""How a server is set up, in words that cost nothing to import."""

from pathlib import Path

from msgspec import Struct


class Unservable(Exception):
    """A set-up that a server must not, or cannot, start with."""


class ServeOptions(Struct, frozen=True):
    """What `leyden serve` is told."""

    home: Path
    host: str = "127.0.0.1"
    port: int = 8484
    store: str | None = None
    """A database URL; None: a SQLite file in the home folder."""
    advertise: str | None = None
    """The URL that workers and agents are told; None: where it listens."""
    keyless: bool = False
    max_body_mb: int = 32
    upstream: str | None = None
    """The base URL of an OpenAI-compatible service that answers model calls."""
    upstream_key: str | None = None

    @property
    def location(self) -> str:
        """Where the store is."""
        return self.store or str(self.home / "leyden.db")


class Running(Struct, frozen=True):
    """A server that listens."""

    url: str
    advertised: str
    store: str
    admin_key_file: str
