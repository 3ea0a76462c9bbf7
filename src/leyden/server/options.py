"""Options of a server. This module is cheap to import."""

import signal
from pathlib import Path

import msgspec
from msgspec import Struct

from leyden import defaults
from leyden.config.schema import ServerConfig, UpstreamConfig
from leyden.engine.protocol import EngineAddress

SHOW_STACK = signal.SIGUSR1
"""Makes a server process write the stacks of its threads to its log."""
REFUSED = 2
"""Exit status of a server that cannot start with its options; starting it again does not help."""
STORE_LOST = 3
"""Exit status of a server whose store was deleted, moved or taken over: a new one would begin with an empty store."""


class ServeError(Exception):
    """The server cannot, or must not, start with its options."""


class ServeOptions(Struct, frozen=True):
    """Options of `leyden serve`."""

    home: Path
    server: ServerConfig = ServerConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    """A service that answers model calls."""
    upstream_key: str | None = None
    store: str | None = None
    """A database URL; None: a SQLite file in the home folder."""
    create: bool = True
    """Whether a SQLite file that does not exist is created; otherwise it was lost."""
    keyless: bool = False
    max_body_mb: int = defaults.MAX_BODY_MB
    beside: Path | None = None
    """The folder of all runs, if pages are to list those beside the home folder instead of those in it."""
    direct: bool = False
    """Whether models may be called outside rollouts: with a client's key, and on loopback with any key or none."""

    @property
    def max_body(self) -> int:
        """The size limit of a body in bytes, compressed or not."""
        return self.max_body_mb * 2**20

    @property
    def location(self) -> str:
        """The path or URL of the store."""
        return self.store or str(self.home / "leyden.db")


class ServedPolicy(Struct, frozen=True):
    """A policy that a server process serves."""

    policy: str
    """The name under which calls are recorded."""
    model: str
    """The folder with its tokenizer."""
    name: str
    """The model's name in messages."""
    engine: EngineAddress
    held: bool = False
    """Whether none of its calls starts before a version of its weights is published."""


class ServerProcessOptions(Struct, frozen=True):
    """Options of a server process whose engines run in its parent process."""

    serve: ServeOptions
    policies: tuple[ServedPolicy, ...]
    release: bool = False
    """Whether all active attempts are released at the start, because their workers or their model calls are gone."""
    park: str | None = None
    """A run whose rollouts are parked at the start: its training requests again what it needs."""

    def to_json(self) -> str:
        """Encode as one line of JSON."""
        return msgspec.json.encode(self, enc_hook=str).decode()  # the hook is for paths

    @classmethod
    def from_json(cls, text: str) -> "ServerProcessOptions":
        """Decode what `to_json` wrote."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda path, text: path(text))


class RunningServer(Struct, frozen=True):
    """A server that listens."""

    url: str
    advertised: str
    store: str
    admin_key_file: str
    dashboard: str
    """A link that opens the pages: it carries a viewer's key behind #, which browsers keep from servers and logs."""
