"""Connections end in time, and their number leaves room: for those who hold a key, and for other keys."""

import asyncio
import socket
from pathlib import Path

import aiohttp
import pytest
from serving import ServerProcess

from leyden.api.client import Remote
from leyden.api.wire import GroupSpec, LeaseRequest, RunSpec
from leyden.records import RunSettings, Task
from leyden.server.http import connections
from leyden.server.options import ServeOptions
from leyden.server.serve import open_server

HEAD = b"POST /api/runs HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


async def test_half_open_connections_do_not_lock_out_those_who_hold_a_key(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        few_descriptors(server, 300)
        url = server.url
        async with Remote(url, server.admin_key) as before, aiohttp.ClientSession() as anybody:
            await before.list_runs()  # this connection stays open
            half_open = []
            for number in range(400):
                half_open.append(connect(url))
                if number % 2:
                    half_open[-1].sendall(HEAD)
            for _ in range(3):
                async with asyncio.timeout(30), Remote(url, server.admin_key) as new:
                    assert await new.list_runs() == await before.list_runs() == []
            async with anybody.get(f"{url}/healthz", timeout=aiohttp.ClientTimeout(30)) as health:
                assert health.status == 200
            closed = 0
            for attacker in half_open:
                attacker.settimeout(0.001)
                try:
                    closed += attacker.recv(1) == b""
                except ConnectionError:
                    closed += 1
                except TimeoutError:
                    pass
                attacker.close()
            assert closed >= 250  # the oldest made room


def few_descriptors(server: ServerProcess, number: int) -> None:
    """Start a server again with so many descriptors."""
    server.stop()
    server.prefix = ("bash", "-c", f'ulimit -n {number}; exec "$@"', "bash")
    server.start()


async def idle_connections(url: str, key: str, number: int) -> list[socket.socket]:
    """Open connections on which a key was sent, and leave them idle."""
    opened = []
    request = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode()
    for _ in range(number):
        opened.append(connect(url))
        opened[-1].sendall(request)
        await asyncio.to_thread(opened[-1].recv, 65536)
    return opened


async def test_idle_connections_of_agents_do_not_lock_out_others(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        few_descriptors(server, 300)
        async with Remote(server.url, server.admin_key) as remote:
            await remote.create_run(RunSpec("r", RunSettings()))
            await remote.enqueue("r", GroupSpec("g", Task("t", {}), 6))
            leases = await remote.lease(LeaseRequest("w", 6))
            opened = await idle_connections(server.url, leases[0].key, 230)
            for lease in leases[1:]:
                opened += await idle_connections(server.url, lease.key, 45)
            for _ in range(3):
                async with asyncio.timeout(30), Remote(server.url, server.admin_key) as new:
                    assert len(await new.list_runs()) == 1
            for connection in opened:
                connection.close()


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, HEAD + b"content-length: 9\r\n\r\n{", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /heal"],
    ids=["silent", "half a head", "half a body", "half a second head"],
)
async def test_a_request_that_does_not_arrive_in_time_ends(
    sent: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_HEAD_S", "_BODY_IDLE_S"):
        monkeypatch.setattr(connections, limit, 0.5)
    async with open_server(ServeOptions(tmp_path, keyless=True)) as server:
        host, _, port = server.running.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            try:
                while await reader.read(1000):
                    pass
            except ConnectionError:
                pass
            async with session.get(f"{server.running.url}/healthz") as health:
                assert health.status == 200
        writer.close()


async def test_an_answer_that_nobody_reads_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_WRITE_S", 0.5)
    async with open_server(ServeOptions(tmp_path, keyless=True)) as server:
        host, _, port = server.running.url.removeprefix("http://").rpartition(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, int(port)))
            await loop.sock_sendall(client, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400)
            async with asyncio.timeout(60), aiohttp.ClientSession() as session:
                while len(server.server_state.connections):  # noqa: ASYNC110 - nothing tells when it is closed
                    await asyncio.sleep(0.05)
                async with session.get(f"{server.running.url}/healthz") as health:
                    assert health.status == 200


@pytest.mark.parametrize(
    "headers", [b"a: b\r\n" * 300, b"a: " + b"x" * 200_000 + b"\r\n"], ids=["many headers", "a large header"]
)
async def test_a_flood_of_headers_is_refused(headers: bytes, tmp_path: Path) -> None:
    async with open_server(ServeOptions(tmp_path, keyless=True)) as server:
        host, _, port = server.running.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n")
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        writer.close()
