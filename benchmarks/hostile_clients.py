"""The attackers of benchmarks/open_rollouts.py.

Reads one JSON object with `url`, `keys`, `kinds` and `scale` from standard input, attacks in these ways until standard
input closes, and prints how often each attack was made. The keys are those of running attempts, as agents have them.
"""

import asyncio
import json
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

CONNECTIONS = {"idle": 2000, "half": 1000, "slow": 50, "unread": 50, "large": 4, "headers": 8}
"""Connections of each kind of attack at full scale."""
LARGE_BODY = 100 << 20
BLOCK = b" " * (1 << 18)
PAUSE_S = 1.0
BROKEN = (OSError, asyncio.IncompleteReadError)


class Attackers:
    """Connections that do what no agent should."""

    def __init__(self, host: str, port: int, keys: list[str]) -> None:
        self._host, self._port, self._keys = host, port, keys
        self.counts: Counter[str] = Counter()

    async def run(self, kinds: list[str], scale: float) -> None:
        """Attack in these ways until cancelled."""
        attacks: dict[str, Callable[[int], Awaitable[None]]] = {
            "idle": self._idle,
            "half": self._half_a_request,
            "slow": self._read_slowly,
            "unread": self._leave_unread,
            "large": self._send_large_body,
            "headers": self._send_headers,
        }
        async with asyncio.TaskGroup() as tasks:
            for kind in kinds:
                for number in range(max(2, round(CONNECTIONS[kind] * scale))):
                    tasks.create_task(self._repeat(kind, attacks[kind], number))

    async def _repeat(self, kind: str, attack: Callable[[int], Awaitable[None]], number: int) -> None:
        await asyncio.sleep(number % 50 / 50 * PAUSE_S)
        while True:
            with suppress(*BROKEN):
                self.counts[kind] += 1
                await attack(number)
            await asyncio.sleep(PAUSE_S)

    async def _idle(self, number: int) -> None:
        """Connect, say nothing, and wait until the server closes."""
        reader, writer = await self._connect()
        await _until_closed(reader, writer)

    async def _half_a_request(self, number: int) -> None:
        """Send half a head, or half a body with a valid key."""
        reader, writer = await self._connect()
        head = self._head(number, f"content-length: {1 << 20}\r\n")
        writer.write(head + b'{"model": ' if number % 2 else head[: len(head) // 2])
        await _until_closed(reader, writer)

    async def _read_slowly(self, number: int) -> None:
        """Read a stream of megabytes a few hundred bytes at a time."""
        sock = await self._open_stream(number)
        try:
            while await asyncio.get_running_loop().sock_recv(sock, 256):  # noqa: ASYNC110 - it waits to be slow
                await asyncio.sleep(0.5)
        finally:
            sock.close()

    async def _leave_unread(self, number: int) -> None:
        """Open a stream and never read it; every second of these also closes its own side."""
        sock = await self._open_stream(number)
        try:
            if number % 2:
                sock.shutdown(socket.SHUT_WR)
            await asyncio.sleep(60)
        finally:
            sock.close()

    async def _send_large_body(self, number: int) -> None:
        """Send 100 MB, announced or in chunks, with a key or without."""
        _, writer = await self._connect()
        chunked = number % 2 == 1
        announced = "transfer-encoding: chunked\r\n" if chunked else f"content-length: {LARGE_BODY}\r\n"
        writer.write(self._head(number, announced, key=number % 4 < 2))
        block = b"%x\r\n%s\r\n" % (len(BLOCK), BLOCK) if chunked else BLOCK
        try:
            for _ in range(LARGE_BODY // len(BLOCK)):
                writer.write(block)
                await writer.drain()
        finally:
            writer.transport.abort()

    async def _send_headers(self, number: int) -> None:
        """Send headers without end: many small ones, or one large one."""
        _, writer = await self._connect()
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
        try:
            for _ in range(10_000):
                writer.write(b"a: b\r\n" * 2000 if number % 2 else b"x" * 12_000)
                await writer.drain()
        finally:
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)

    async def _open_stream(self, number: int) -> socket.socket:
        """Start a streamed answer of several megabytes over a connection with small buffers."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(sock, (self._host, self._port))
        body = {"model": "long", "stream": True, "logprobs": True, "top_logprobs": 1}
        data = json.dumps({**body, "messages": [{"role": "user", "content": "Tell all."}]}).encode()
        await loop.sock_sendall(sock, self._head(number, f"content-length: {len(data)}\r\n") + data)
        return sock

    def _head(self, number: int, more: str, key: bool = True) -> bytes:
        authorization = f"authorization: Bearer {self._keys[number % len(self._keys)]}\r\n" if key else ""
        lines = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        return f"{lines}{authorization}{more}\r\n".encode()


async def _until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.read(1 << 16):
            pass
    finally:
        writer.transport.abort()


async def main() -> None:
    """Attack until standard input closes, and print what was done."""
    options: dict[str, Any] = json.loads(sys.stdin.readline())
    host, _, port = options["url"].removeprefix("http://").rpartition(":")
    attackers = Attackers(host, int(port), options["keys"])
    attacking = asyncio.create_task(attackers.run(options["kinds"], options["scale"]))
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait((attacking, closed), return_when=asyncio.FIRST_COMPLETED)
    if attacking.done():
        attacking.result()
    print(json.dumps(attackers.counts), flush=True)
    attacking.cancel()
    await asyncio.wait((attacking,))


if __name__ == "__main__":
    asyncio.run(main())
