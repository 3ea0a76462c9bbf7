"""How a server is set up, in words that cost nothing to import."""

from pathlib import Path

import msgspec
from msgspec import Struct

from leyden import defaults
from leyden.engine.protocol import EngineAddress

REFUSED = 2
"""The exit status of a server that cannot serve, whatever is tried."""


class ServeError(Exception):
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
    max_body_mb: int = defaults.MAX_BODY_MB
    upstream: str | None = None
    """The base URL of an OpenAI-compatible service that answers model calls."""
    upstream_key: str | None = None
    upstream_timeout_s: float = defaults.UPSTREAM_TIMEOUT_S
    """How long it may be silent."""

    @property
    def location(self) -> str:
        """Where the store is."""
        return self.store or str(self.home / "leyden.db")


class ServerProcessOptions(Struct, frozen=True):
    """What a server is told that serves a model which another process computes."""

    serve: ServeOptions
    policy: str
    """What the model is called in the record."""
    model: str
    """The folder with its tokenizer."""
    name: str
    """What that is known by."""
    engine: EngineAddress
    release: bool = False
    """Whether every attempt under way is of workers that are gone."""

    def to_json(self) -> str:
        """As a line for that server."""
        return msgspec.json.encode(self, enc_hook=str).decode()  # the hook is for paths

    @classmethod
    def from_json(cls, text: str) -> "ServerProcessOptions":
        """What was written by `to_json`."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda path, text: path(text))


class RunningServer(Struct, frozen=True):
    """A server that listens."""

    url: str
    advertised: str
    store: str
    admin_key_file: str
