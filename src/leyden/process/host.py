"""Starts processes for other machines, which have its key, and relays their streams (`leyden.process.place`)."""

import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import socket
import struct
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from subprocess import PIPE
from typing import IO

import msgspec

from leyden.process.child import ChildProcess, pipe_chunks
from leyden.process.framing import FrameTooLarge, read_frame, to_frame
from leyden.process.guardian import CANNOT_RUN
from leyden.process.place import (
    READ_BYTES,
    AttachSocket,
    FindMissing,
    HostRequest,
    OpenSocket,
    PutFolder,
    RemotePlace,
    StartChild,
    find_missing,
    keep_alive,
    relay,
)
from leyden.process.proxy import ENDED, ERRORS, INPUT, OUTPUT, STARTED
from leyden.process.temporary import TemporaryFolder

_OPENING_TIMEOUT_S = 10.0
_KEY_BYTES = 64
_GRACE_S = 15.0
"""How long a process may take to end when its standard input closes."""
_POLL_S = 0.05
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of ioctl(2)."""


class ProcessHost:
    """Listens at an address of this machine, and nowhere else."""

    def __init__(self) -> None:
        self._temporary = TemporaryFolder("host")
        self._folder = self._temporary.path
        self._key = secrets.token_hex(_KEY_BYTES // 2)
        self._sockets: dict[str, list[socket.socket]] = {}
        """By child, our ends of the sockets that it inherited, until they are attached."""
        self._server: asyncio.Server

    async def open(self, address: str, name: str) -> RemotePlace:
        """Listen on any free port; return what another machine needs."""
        self._server = await asyncio.start_server(self._serve, address, 0, limit=READ_BYTES)
        port = self._server.sockets[0].getsockname()[1]
        return RemotePlace(name, address, port, self._key, str(self._folder), _interface_of(address))

    def close(self) -> None:
        """Take no more requests, and delete all files."""
        self._server.close()
        self._temporary.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        keep_alive(writer.get_extra_info("socket"))
        try:
            async with asyncio.timeout(_OPENING_TIMEOUT_S):
                key = await read_frame(reader, _KEY_BYTES)
                if key is None or not secrets.compare_digest(key, self._key.encode()):
                    return
                opening = await read_frame(reader)
            if opening is not None:
                await self._answer(msgspec.json.decode(opening, type=HostRequest), reader, writer)
        except (OSError, FrameTooLarge, KeyError):  # also a time-out, and a child that has ended
            pass
        finally:
            writer.close()

    async def _answer(self, request: HostRequest, reader: StreamReader, writer: StreamWriter) -> None:
        match request:
            case StartChild():
                await self._run(request, reader, writer)
            case AttachSocket(child, index):
                ours = await asyncio.open_unix_connection(sock=self._sockets[child][index], limit=READ_BYTES)
                await relay(ours, (reader, writer))
            case OpenSocket(path):
                opened = await _open(path, reader)
                writer.write(to_frame(b""))
                await relay(opened, (reader, writer))
            case PutFolder():
                writer.write(to_frame(await self._receive(request, reader)))
            case FindMissing(paths):
                writer.write(to_frame(msgspec.json.encode(find_missing(paths))))

    async def _run(self, request: StartChild, reader: StreamReader, writer: StreamWriter) -> None:
        pairs = [socket.socketpair() for _ in range(request.sockets)]
        numbers = [theirs.fileno() for _, theirs in pairs]
        try:
            process = ChildProcess(
                [*request.command, *map(str, numbers)],
                environment={**os.environ, **request.environment},
                pass_fds=numbers,
                stdout=PIPE,
                stderr=PIPE,
                grace_s=_GRACE_S,
            )
        except OSError as error:
            message = f"{request.command[0]} cannot be started on this node: {error.strerror}\n"
            writer.write(to_frame(ERRORS + message.encode()) + to_frame(ENDED + str(CANNOT_RUN).encode()))
            return
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._sockets[request.id] = [ours for ours, _ in pairs]
        writer.write(to_frame(STARTED))
        assert process.process.stdout is not None and process.process.stderr is not None
        streams = ((process.process.stdout, OUTPUT), (process.process.stderr, ERRORS))
        sending = [asyncio.create_task(_send(pipe, kind, writer)) for pipe, kind in streams]
        controlling = asyncio.create_task(_control(process, reader))
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({controlling, ended}, return_when=asyncio.FIRST_COMPLETED)
            status = await process.end()  # if the other machine is gone; it may have ended
            # a descendant may hold the pipes open
            await asyncio.wait(sending, timeout=_POLL_S if controlling.done() else _GRACE_S)
            writer.write(to_frame(ENDED + str(status).encode()))
        finally:
            process.kill()
            tasks = (controlling, ended, *sending)
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for ours in self._sockets.pop(request.id):
                ours.close()

    async def _receive(self, request: PutFolder, reader: StreamReader) -> bytes:
        """Write the files of a folder; return its path, or nothing if the disk is full."""
        purpose = self._folder / request.purpose
        folder = purpose / request.name
        try:
            shutil.rmtree(purpose, ignore_errors=True)
            folder.mkdir(parents=True)
            for name, size in request.files:
                with (folder / name).open("wb") as file:
                    while size:
                        data = await reader.read(min(size, READ_BYTES))
                        if not data:
                            raise ConnectionError
                        file.write(data)
                        size -= len(data)
        except OSError:
            shutil.rmtree(purpose, ignore_errors=True)
            return b""
        return str(folder).encode()


async def _control(process: ChildProcess, reader: StreamReader) -> None:
    """Pass on standard input and signals until the connection is lost."""
    while (frame := await read_frame(reader)) is not None:
        if not frame.startswith(INPUT):
            process.process.send_signal(signal.SIGTERM)
        elif data := frame[1:]:
            process.send(data)
        else:
            process.hang_up()


async def _send(pipe: IO[bytes], kind: bytes, writer: StreamWriter) -> None:
    async for data in pipe_chunks(pipe):
        writer.write(to_frame(kind + data))
        await writer.drain()


async def _open(path: str, client: StreamReader) -> tuple[StreamReader, StreamWriter]:
    """Connect to a Unix socket as soon as something listens there. Raises `OSError` if the client is gone before."""
    while True:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return await asyncio.open_unix_connection(path, limit=READ_BYTES)
        if client.at_eof():
            raise ConnectionError
        await asyncio.sleep(_POLL_S)


def _interface_of(address: str) -> str:
    """Return the name of the network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return "lo" if address.startswith("127.") else ""
