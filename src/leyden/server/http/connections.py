"""Limits what a connection may cost before its caller has shown a key, and how many connections a key may have.

Heads have a limit of size and time, bodies and answers that nobody reads a limit of time, and connections on which no
valid key was sent a limit of number: a new connection replaces the oldest of them, so that descriptors are left for
callers with keys. A key that has as many as it may loses the one that has been idle the longest. uvicorn itself limits
only how long a connection is idle between two requests.
"""

import asyncio
import resource
from collections.abc import Iterable, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from leyden.server.control.keys import Key, KeyKind
from leyden.server.http.limits import Limit, RateLimited

KEEP_ALIVE_S = 75
"""How long a connection may be idle between two requests."""
_MAX_HEAD, _MAX_HEADERS = 128 * 1024, 256
_HEAD_S = 20.0
"""How long a head may take; on a new connection, how long the caller may be silent."""
_BODY_IDLE_S, _BODY_S = 30.0, 600.0
"""How long a body may pause, and take in all."""
_WRITE_S = 120.0
"""How long a client may leave an answer unread that no longer fits into the buffers."""
_SWEEP_S = 0.5
_RESERVED = 100
"""Descriptors for the database, the engine and files."""


class ConnectionLimits:
    """The open connections of one server."""

    def __init__(self, limits: Mapping[KeyKind, Limit]) -> None:
        self._limits = limits
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = max(limit - _RESERVED, limit // 2)
        self._max_anonymous = self._max_connections // 2
        self._open: set[LimitedConnection] = set()
        self._anonymous: dict[LimitedConnection, None] = {}
        """Connections on which no valid key was sent, the oldest first."""
        self._of_key: dict[str, dict[LimitedConnection, None]] = {}
        """The connections of each key, by the latest that was sent on one; those that got it first come first."""
        self._sweeping: asyncio.TimerHandle | None = None

    def protocol(self, *args: Any, **kwargs: Any) -> "LimitedConnection":
        """Create the protocol of a connection; uvicorn calls it like a protocol class."""
        return LimitedConnection(self, *args, **kwargs)

    def add(self, connection: "LimitedConnection") -> None:
        """Count a new connection; if there are too many, close another one."""
        self._open.add(connection)
        self._anonymous[connection] = None
        if len(self._open) > self._max_connections:
            self._make_room()
        elif len(self._anonymous) > self._max_anonymous:
            self._close(next(iter(self._anonymous)))
        if self._sweeping is None:
            self._sweep()

    def hold(self, connection: "LimitedConnection", key: Key) -> None:
        """Count a connection for a key that was sent on it. Raises `RateLimited` if all of the key's are in use."""
        limit, held = self._limits[key.kind], self._of_key.get(key.id, {})
        allowed = max(1, min(limit.connections, int(limit.share * self._max_connections)))
        if len(held) >= allowed and not self._close_idle(held):
            raise RateLimited(f"more than {allowed} connections at once", 1.0)
        self._release(connection)
        self._of_key.setdefault(key.id, {})[connection] = None
        connection.key = key.id
        self._anonymous.pop(connection, None)

    def remove(self, connection: "LimitedConnection") -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)
        self._anonymous.pop(connection, None)
        self._release(connection)

    def _make_room(self) -> None:
        """Close the oldest connection without a key; if only the new one has none, an idle one of the busiest key."""
        oldest = next(iter(self._anonymous))
        if len(self._anonymous) == 1:
            for held in sorted(self._of_key.values(), key=len, reverse=True):
                if self._close_idle(held):
                    return
        self._close(oldest)

    def _close_idle(self, connections: Iterable["LimitedConnection"]) -> bool:
        """Close the first connection without a request; return whether there was one."""
        idle = next((connection for connection in connections if connection.is_idle), None)
        if idle is None:
            return False
        self._close(idle)
        return True

    def _close(self, connection: "LimitedConnection") -> None:
        self.remove(connection)
        connection.transport.abort()

    def _release(self, connection: "LimitedConnection") -> None:
        """Stop counting a connection for its key."""
        if connection.key is not None and (held := self._of_key.get(connection.key)) is not None:
            held.pop(connection, None)
            if not held:
                del self._of_key[connection.key]
        connection.key = None

    def _sweep(self) -> None:
        """Close connections that are over time; repeat while there are any."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [one for one in self._open if one.is_over_time(now)]:
            connection.transport.abort()
        self._sweeping = loop.call_later(_SWEEP_S, self._sweep) if self._open else None


class HeadTooLarge(Exception):
    """A head has more headers, or larger ones, than the server parses."""


class LimitedConnection(HttpToolsProtocol):
    """Answers 400 and closes the connection when a head exceeds 128 KiB or 256 headers; keeps its deadlines."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._in_head, self._head = True, 0
        self._header_bytes = 0
        self._deadline: float | None = None
        self._body_deadline = 0.0
        self._write_deadline: float | None = None
        self.key: str | None = None
        """The id of the latest valid key that was sent."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received or answered."""
        return not self._head and (self.cycle is None or self.cycle.response_complete)

    def is_over_time(self, now: float) -> bool:
        """Whether the head, the body or the reading of the answer takes too long.

        A body that the server does not read yet does not count.
        """
        if self._write_deadline is not None and now > self._write_deadline:
            return True
        return self._deadline is not None and now > self._deadline and not self.flow.read_paused

    def holds_key(self, key: Key) -> None:
        """Called when a request on this connection has a valid key. Raises `RateLimited` if it has too many."""
        if self.key != key.id:
            self._limits.hold(self, key)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Wait for the first head."""
        super().connection_made(transport)
        self._deadline = self.loop.time() + _HEAD_S
        self._limits.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the descriptor."""
        self._limits.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes until the headers are complete, and set the deadline for what must follow."""
        self._head += len(data) if self._in_head else 0
        super().data_received(data)
        if self._head > _MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The request headers are too large.")
        if not self._in_head:
            self._deadline = min(self.loop.time() + _BODY_IDLE_S, self._body_deadline)
        elif not self._head:
            self._deadline = None  # the request is complete; uvicorn limits the time until the next
        elif self._deadline is None:
            self._deadline = self.loop.time() + _HEAD_S

    def pause_writing(self) -> None:
        """Wait until the client reads."""
        self._write_deadline = self.loop.time() + _WRITE_S
        super().pause_writing()

    def resume_writing(self) -> None:
        """Continue: the client has read most of what was sent."""
        self._write_deadline = None
        super().resume_writing()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stop parsing a head with too many or too large headers, which makes uvicorn answer 400."""
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= _MAX_HEADERS or self._header_bytes > _MAX_HEAD:
            raise HeadTooLarge
        super().on_header(name, value)

    def on_message_begin(self) -> None:
        """Count a head that begins behind the request before it."""
        self._head = max(self._head, 1)
        self._header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop counting: bodies have their own limit."""
        self._in_head, self._head, self._deadline = False, 0, None
        self._body_deadline = self.loop.time() + _BODY_S
        self.scope["state"]["connection"] = self
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Count again for the next request."""
        self._in_head = True
        super().on_message_complete()
