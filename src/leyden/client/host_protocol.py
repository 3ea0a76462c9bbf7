"""Messages between a worker and its host processes: frames of JSON over a socket pair.

The agent's standard streams are not used. A closed socket means that the other side is gone.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from leyden.api.wire import FinishRequest, Lease
from leyden.client.isolation.options import IsolationOptions
from leyden.config.schema import RolloutConfig, ServiceConfig
from leyden.process.framing import MAX_FRAME, FrameTooLarge, read_frame, read_frame_blocking, to_frame
from leyden.records import Reward

T = TypeVar("T")


class HostSetup(Struct, frozen=True, tag="setup"):
    """The first message to a host: what it is to run, and for which server."""

    agent: str
    base: str
    path: tuple[str, ...]
    server: str
    key: str
    """The key of its pool, or of its only attempt. A host of commands has none."""
    concurrency: int
    """How many attempts it may run at the same time."""
    has_reward_function: bool
    """Whether the run has a reward function; without one, a number that the agent returns is the reward."""
    isolation: IsolationOptions = IsolationOptions()
    """How commands are isolated and limited, and the host itself if it runs agent code."""
    services: dict[str, ServiceConfig] = {}
    """Services that the agent may take. Of a command it receives the address; objects are created in the host."""

    @property
    def rollout(self) -> RolloutConfig:
        """The section of the configuration."""
        return self.isolation.rollout


class StopAttempt(Struct, frozen=True, tag="stop"):
    """Stop an attempt if possible. `StopReply` follows at once, `CodeReturned` when its code has returned."""

    attempt: str


class FlushSpans(Struct, frozen=True, tag="flush"):
    """Export the spans of an attempt now. `SpansFlushed` follows when the server has them, or they have failed."""

    attempt: str


class Ping(Struct, frozen=True, tag="ping"):
    """Ask whether the event loop runs. `Pong` follows when it does."""

    number: int


class FindBlocker(Struct, frozen=True, tag="who"):
    """Ask whose code blocks the event loop. `BlockerFound` follows."""


class HostReady(Struct, frozen=True, tag="ready"):
    """The agent is loaded."""

    services: tuple[str, ...] = ()
    """Services whose addresses its attempts need."""
    max_concurrency: int | None = None
    """How many attempts the services created in the host suffice for; None: no limit."""


class HostFailed(Struct, frozen=True, tag="unready"):
    """The agent cannot be loaded; the message says why."""

    message: str


class CodeReturned(Struct, frozen=True, tag="returned"):
    """The code of an attempt has returned; its slot is free."""

    attempt: str
    report: FinishRequest
    """How it ended. Agent code can write to the channel: the worker takes from it only what an agent may say."""
    has_spans: bool = False
    """Whether `FlushSpans` must come before the end is reported: the server accepts no spans afterwards."""
    loop_error: bool = False
    """Whether a sync agent failed with something that belongs to the event loop of another thread."""


class StepReward(Struct, frozen=True, tag="rewarded"):
    """The agent gave a reward while its attempt runs."""

    attempt: str
    reward: Reward


class StopReply(Struct, frozen=True, tag="stopping"):
    """The output so far of an attempt that is being stopped."""

    attempt: str
    output: str = ""
    blocked_by: str | None = None
    """The attempt that blocks the event loop now, if any."""
    blocked_s: float = 0.0
    """For how long the event loop was blocked, by any code, since the attempt was started."""
    has_spans: bool = False
    """As for `CodeReturned`."""


class SpansFlushed(Struct, frozen=True, tag="flushed"):
    """The spans of an attempt are exported, or have failed to."""

    attempt: str


class Pong(Struct, frozen=True, tag="pong"):
    """The event loop runs."""

    number: int


class BlockerFound(Struct, frozen=True, tag="blocked"):
    """The attempt whose code blocks the event loop; None if none does, or it cannot be determined."""

    attempt: str | None


# a lease has the URL of the server for agents and, if the host has a key, that one; `CodeReturned` follows
ToHost = HostSetup | Lease | StopAttempt | FlushSpans | Ping | FindBlocker
ToWorker = HostReady | HostFailed | CodeReturned | StopReply | SpansFlushed | StepReward | Pong | BlockerFound


class InvalidMessage(Exception):
    """The other side sent something that is no message: code of an agent may have written to the socket."""


class MessageStream(Generic[T]):
    """The async end of the socket: the worker's, and that of a host that runs commands."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected: Any, max_frame: int = MAX_FRAME
    ) -> None:
        self._reader, self._writer, self._max_frame = reader, writer, max_frame
        self._decode: Callable[[bytes], T] = msgspec.json.Decoder(expected).decode

    @classmethod
    async def connect(cls, end: socket.socket, expected: Any, max_frame: int = MAX_FRAME) -> "MessageStream[T]":
        """Use one end of a socket pair; a longer frame than `max_frame` raises `InvalidMessage`."""
        return cls(*await asyncio.open_unix_connection(sock=end), expected, max_frame)

    def send(self, message: Any) -> None:
        """Send without waiting. Does nothing if the other side is gone."""
        if not self._writer.is_closing():
            self._writer.write(to_frame(msgspec.json.encode(message)))

    async def receive(self) -> T | None:
        """Return the next message; None when the other side is gone. Raises `InvalidMessage`."""
        try:
            body = await read_frame(self._reader, self._max_frame)
            return None if body is None else self._decode(body)
        except (FrameTooLarge, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidMessage(str(error)) from error

    def close(self) -> None:
        """Close the socket; a host process ends when its worker does."""
        self._writer.close()


class MessagePipe:
    """The blocking end of the socket: threads of a host use it even while the host's event loop is blocked."""

    def __init__(self, end: socket.socket) -> None:
        self._decode: Callable[[bytes], ToHost] = msgspec.json.Decoder(ToHost).decode
        self._socket = end
        self._file = end.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send from any thread. Does nothing if the worker is gone."""
        data = to_frame(msgspec.json.encode(message))
        with self._sending, suppress(OSError):
            self._socket.sendall(data)

    def receive(self) -> ToHost | None:
        """Return the next message; None when the worker is gone."""
        body = read_frame_blocking(self._file)
        return None if body is None else self._decode(body)
