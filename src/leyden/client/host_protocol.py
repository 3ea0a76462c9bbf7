"""What a worker and its hosts say to each other: length-prefixed JSON over a socket that only the two of them have.

The agent's own standard streams stay its own. A socket that closes means that the other side is gone.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from leyden.config.schema import ServiceConfig
from leyden.framing import read_frame, read_frame_blocking, to_frame
from leyden.outcomes import Outcome, Retry
from leyden.records import Reward

T = TypeVar("T")


class HostSetup(Struct, frozen=True, tag="setup"):
    """What a host is to be; the first thing it hears."""

    agent: str
    base: str
    path: tuple[str, ...]
    server: str
    key: str
    """Its pool's."""
    places: int
    scored: bool
    """Whether the run has a reward function."""
    memory_mb: int | None = None
    cpu_s: float | None = None
    """Limits of each process of a command."""
    mark: str = ""
    """The worker's, by which its descendants are known."""
    services: dict[str, ServiceConfig] = {}
    """Those that may be asked for; commands are lent by their address, others are made in the host."""


class StartAttempt(Struct, frozen=True, tag="start"):
    """Run an attempt."""

    attempt: str
    rollout: str
    traceparent: str
    task: Any
    run: str = ""
    key: str = ""
    """The attempt's own, for what runs in a process of its own."""
    services: dict[str, str] = {}
    """The addresses of those that it is lent."""


class StopAttempt(Struct, frozen=True, tag="stop"):
    """Stop an attempt if possible: `HostStopping` follows at once, `AttemptEnd` when its code has returned."""

    attempt: str


class Ping(Struct, frozen=True, tag="ping"):
    """Is the event loop running? `Pong` follows when it is."""

    number: int


class FindBlocker(Struct, frozen=True, tag="who"):
    """Whose code keeps the event loop from running? `BlockerFound` follows."""


class HostReady(Struct, frozen=True, tag="ready"):
    """The agent is loaded."""

    services: tuple[str, ...] = ()
    """Whose addresses its attempts are to be lent."""
    at_once: int | None = None
    """How many of them can run at once, each with services that are made here; None: as many as there are places."""


class HostFailed(Struct, frozen=True, tag="unready"):
    """The agent cannot be loaded, and why."""

    message: str


class AttemptEnd(Struct, frozen=True, tag="ended"):
    """The code of an attempt has returned, and its place is free."""

    attempt: str
    outcome: Outcome
    result: Raw = Raw(b"null")
    reward: float | None = None
    output: str = ""
    retry: Retry = Retry.CHARGED


class StepReward(Struct, frozen=True, tag="rewarded"):
    """An attempt gave a reward on its way."""

    attempt: str
    reward: Reward


class HostStopping(Struct, frozen=True, tag="stopping"):
    """What an attempt that is being stopped has printed so far, and whose code kept the event loop from running."""

    attempt: str
    output: str = ""
    blocked_by: str | None = None


class Pong(Struct, frozen=True, tag="pong"):
    """The event loop runs."""

    number: int


class BlockerFound(Struct, frozen=True, tag="blocked"):
    """The attempt whose code keeps the event loop from running; None where nobody's does, or it cannot be told."""

    by: str | None


ToHost = StartAttempt | StopAttempt | Ping | FindBlocker
ToWorker = HostReady | HostFailed | AttemptEnd | HostStopping | StepReward | Pong | BlockerFound


class MessageStream(Generic[T]):
    """An end that an event loop has: the worker's, and that of a process with nothing but commands in it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decode: Callable[[bytes], T] = msgspec.json.Decoder(expected).decode

    @classmethod
    async def over(cls, end: socket.socket, expected: Any) -> "MessageStream[T]":
        """Take an end of a pair of sockets."""
        return cls(*await asyncio.open_unix_connection(sock=end), expected)

    def send(self, message: Any) -> None:
        """Send, without waiting; to a side that is gone this does nothing."""
        if not self._writer.is_closing():
            self._writer.write(to_frame(msgspec.json.encode(message)))

    async def receive(self) -> T | None:
        """The next message; None when the other side is gone."""
        body = await read_frame(self._reader)
        return None if body is None else self._decode(body)

    def close(self) -> None:
        """Hang up: a host ends of it."""
        self._writer.close()


class MessagePipe:
    """The host's end: blocking, so that threads may use it whatever its event loop is at."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file = end.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send from any thread; to a worker that is gone this does nothing."""
        data = to_frame(msgspec.json.encode(message))
        with self._sending, suppress(OSError):
            self._socket.sendall(data)

    def receive(self, expected: type[T]) -> T | None:
        """The next message; None when the worker is gone."""
        body = read_frame_blocking(self._file)
        return None if body is None else msgspec.json.decode(body, type=expected)
