"""Stands for a process on another machine: `python -m leyden.process.proxy FD...`, as `ChildProcess` starts it.

It reads its order as a frame from standard input; what follows there is the process's. It ends as the process does.
If the connection is lost, it says so and ends; if this one ends, the host ends the process.
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from typing import NoReturn

import msgspec

from leyden.process.framing import read_frame, to_frame
from leyden.process.guardian import end_like
from leyden.process.place import (
    READ_BYTES,
    AttachSocket,
    OpenSocket,
    PlaceLost,
    ProxyOrder,
    RemotePlace,
    StartChild,
    relay,
)

STARTED, OUTPUT, ERRORS, ENDED = b"s", b"o", b"e", b"x"
"""How frames of the host begin: it has started the process; output, errors, the exit status of it."""
TERMINATE = b"T"
INPUT = b"i"
"""How frames to the host begin: standard input, of which an empty one is the end; SIGTERM."""


async def _main(fds: list[int]) -> int:
    """Run the process; return its exit status, or the signal that ended it as a negative number."""
    stdin = StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    frame = await read_frame(stdin)
    if frame is None:
        return 1
    order = msgspec.json.decode(frame, type=ProxyOrder)
    try:
        return await _run(order, fds, stdin)
    except PlaceLost as lost:
        os.write(2, f"{lost}\n".encode())
        return 1


async def _run(order: ProxyOrder, fds: list[int], stdin: StreamReader) -> int:
    place, number = order.place, secrets.token_hex(8)
    reader, writer = await place.connect(StartChild(number, order.command, order.environment, len(fds)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: writer.write(to_frame(TERMINATE)))
    relays = [asyncio.create_task(_send_input(stdin, writer))]
    while (frame := await read_frame(reader)) is not None:
        kind, data = frame[:1], frame[1:]
        if kind == STARTED:
            relays += [asyncio.create_task(_attach(place, number, index, fd)) for index, fd in enumerate(fds)]
            relays += [asyncio.create_task(_forward(place, *pair, writer)) for pair in order.forwarded]
        elif kind == ENDED:
            return int(data)
        else:
            _write(1 if kind == OUTPUT else 2, data)
    raise place.lost()


async def _send_input(stdin: StreamReader, writer: StreamWriter) -> None:
    while data := await stdin.read(READ_BYTES):
        writer.write(to_frame(INPUT + data))
        await writer.drain()
    writer.write(to_frame(INPUT))


async def _attach(place: RemotePlace, child: str, index: int, fd: int) -> None:
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    with suppress(OSError, PlaceLost):
        here = await asyncio.open_unix_connection(sock=connection, limit=READ_BYTES)
        await relay(here, await place.connect(AttachSocket(child, index)))


async def _forward(place: RemotePlace, here: str, there: str, process: StreamWriter) -> None:
    """Listen on a Unix socket from the moment the process does; end a process that cannot be reached by it."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            opened = await _open(place, there)
        except PlaceLost:
            writer.close()
        else:
            await relay((reader, writer), opened)

    try:
        (await _open(place, there))[1].close()
        server = await asyncio.start_unix_server(serve, here, limit=READ_BYTES)
        await server.serve_forever()
    except (OSError, PlaceLost):
        process.close()


async def _open(place: RemotePlace, path: str) -> tuple[StreamReader, StreamWriter]:
    reader, writer = await place.connect(OpenSocket(path))
    if await read_frame(reader) is None:
        raise place.lost()
    return reader, writer


def _write(fd: int, data: bytes) -> None:
    with suppress(OSError):  # nobody reads it
        while data:
            data = data[os.write(fd, data) :]


def main() -> NoReturn:
    """Stand for the process whose sockets are named as arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = asyncio.run(_main([int(number) for number in sys.argv[1:]]))
    end_like(status << 8 if status >= 0 else -status)


if __name__ == "__main__":
    main()
