"""Where a child process runs: on this machine, or where a `ProcessHost` of another machine starts it.

A child elsewhere looks like one of this machine: a local process (`leyden.process.proxy`) stands for it, with its
standard streams, its inherited sockets, the Unix sockets that it listens on and its exit status. All of that is relayed
over connections that the host accepts only with its key; they are not encrypted.
"""

import asyncio
import os
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from leyden.process.framing import read_frame, read_frame_blocking, to_frame

READ_BYTES = 1 << 18
_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 20.0, 20.0
_STALLED_S = 60.0
"""How long a host may take to receive some bytes of a file."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A machine that is gone without closing its connections is noticed after half a minute."""


class PlaceLost(Exception):
    """A host does not answer any more."""


class StartChild(Struct, frozen=True, tag=True):
    """Start a process. The connection carries its standard streams and its exit status."""

    id: str
    command: Sequence[str]
    environment: Mapping[str, str]
    sockets: int
    """Sockets that it inherits; their numbers are appended to the command."""


class AttachSocket(Struct, frozen=True, tag=True):
    """Become the other end of a socket that a child has inherited."""

    child: str
    index: int


class OpenSocket(Struct, frozen=True, tag=True):
    """Connect to a Unix socket, as soon as something listens there; the host says so by an empty frame."""

    path: str


class PutFolder(Struct, frozen=True, tag=True):
    """Write a folder, in place of the one that had this purpose before; its files follow."""

    purpose: str
    name: str
    files: Sequence[tuple[str, int]]
    """Names and sizes."""


class FindMissing(Struct, frozen=True, tag=True):
    """Return those of some paths at which there is nothing."""

    paths: Sequence[str]


HostRequest = StartChild | AttachSocket | OpenSocket | PutFolder | FindMissing


class Place(Protocol):
    """Where a child process is started."""

    @property
    def interface(self) -> str:
        """The network interface at which processes there listen for one another."""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""

    def path(self, local: Path) -> str:
        """Return the path there that stands for a Unix socket of this machine."""

    async def deliver(self, folder: Path, purpose: str) -> str:
        """Return the path of a folder there, which replaces an earlier one of this purpose. Raises `PlaceLost`."""

    async def missing(self, paths: Sequence[Path]) -> list[str]:
        """Return those of some paths at which there is nothing."""


class ThisMachine:
    """Children are started here."""

    interface = "lo"
    is_here = True

    def path(self, local: Path) -> str:
        """Return the path itself."""
        return str(local)

    async def deliver(self, folder: Path, purpose: str) -> str:
        """Return the folder itself."""
        return str(folder)

    async def missing(self, paths: Sequence[Path]) -> list[str]:
        """Return those of some paths at which there is nothing."""
        return find_missing(map(str, paths))


def find_missing(paths: Iterable[str]) -> list[str]:
    """Return those of some paths at which there is nothing on this machine."""
    return [path for path in paths if not Path(path).exists()]


HERE = ThisMachine()
FindPlace = Callable[[], Awaitable[Place]]
"""Returns where a process is to be started now; it waits until there is such a place."""


async def this_machine() -> Place:
    """Return this machine."""
    return HERE


class RemotePlace(Struct, frozen=True):
    """A `ProcessHost` of another machine."""

    name: str
    """For people."""
    address: str
    port: int
    key: str
    folder: str
    """A folder there that only its user can enter."""
    interface: str
    is_here = False

    def path(self, local: Path) -> str:
        """Return a path in the host's folder."""
        return f"{self.folder}/{local.name}"

    async def deliver(self, folder: Path, purpose: str) -> str:
        """Send the files of a folder."""
        return await asyncio.to_thread(self._send, folder, purpose)

    async def missing(self, paths: Sequence[Path]) -> list[str]:
        """Ask the host."""
        reader, writer = await self.connect(FindMissing([str(path) for path in paths]))
        frame = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    frame = await read_frame(reader)
        finally:
            writer.close()
        if frame is None:
            raise self.lost()
        return msgspec.json.decode(frame, type=list[str])

    async def connect(self, request: HostRequest) -> tuple[StreamReader, StreamWriter]:
        """Open a connection for a request. Raises `PlaceLost`."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self.address, self.port, limit=READ_BYTES)
        except OSError as error:  # also a time-out
            raise self.lost() from error
        keep_alive(writer.get_extra_info("socket"))
        writer.write(self._opening(request))
        return reader, writer

    def lost(self) -> PlaceLost:
        """Return the error that says that the host does not answer."""
        return PlaceLost(f"{self.name} is lost")

    def _opening(self, request: HostRequest) -> bytes:
        return to_frame(self.key.encode()) + to_frame(msgspec.json.encode(request))

    def _send(self, folder: Path, purpose: str) -> str:
        files = [(file.name, file.stat().st_size) for file in sorted(folder.iterdir())]
        try:
            with socket.create_connection((self.address, self.port), _STALLED_S) as connection:
                connection.sendall(self._opening(PutFolder(purpose, folder.name, files)))
                for name, _ in files:
                    with (folder / name).open("rb") as file:
                        connection.sendfile(file)
                reply = read_frame_blocking(connection.makefile("rb"))
        except OSError as error:
            raise self.lost() from error
        if reply is None:
            raise self.lost()
        if not reply:
            raise PlaceLost(f"{self.name} cannot write the files of {folder}: its disk may be full")
        return reply.decode()


class ProxyOrder(Struct, frozen=True):
    """What a proxy does, as it reads it from standard input."""

    place: RemotePlace
    command: Sequence[str]
    environment: Mapping[str, str]
    forwarded: Sequence[tuple[str, str]]
    """Unix sockets to listen on here, and where the child listens."""


def added_variables(environment: Mapping[str, str] | None) -> dict[str, str]:
    """Return what an environment has that this process has not: another machine has its own paths."""
    return {name: value for name, value in (environment or {}).items() if os.environ.get(name) != value}


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice that the other machine is gone, and send small messages at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def relay(one: tuple[StreamReader, StreamWriter], other: tuple[StreamReader, StreamWriter]) -> None:
    """Copy both ways until one of the ends is closed, then close the other."""
    copies = [asyncio.create_task(_copy(one[0], other[1])), asyncio.create_task(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        one[1].close()
        other[1].close()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()
