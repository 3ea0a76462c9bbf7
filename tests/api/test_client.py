"""A server that cannot be reached and a server that does not reply in time are different errors."""

import asyncio
import socket
from contextlib import closing

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from leyden.api import client as remote
from leyden.api.client import Remote, RemoteError, ReplyTimeout, ServerUnreachable
from leyden.backoff import Backoff
from leyden.cli import main
from leyden.client.retrying_client import RetryingClient
from leyden.local import retrying_remote
from leyden.local.retrying_remote import RetryingRemote


def unused_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_no_connection_is_an_unreachable_server() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    async with Remote(url) as server:
        with pytest.raises(ServerUnreachable, match=f"cannot reach the server at {url}"):
            await server.runs()


@pytest.mark.parametrize("by_trainer", [True, False])
async def test_trainers_and_workers_repeat_what_a_server_may_answer_later(by_trainer: bool) -> None:
    statuses = [429, 408, 500, 502, 503, 200, 409, 200]

    async def answer(request: web.Request) -> web.Response:
        return web.json_response([], status=statuses.pop(0))

    app = web.Application()
    app.router.add_get("/api/runs", answer)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        async with RetryingRemote(url, "", lambda: False) if by_trainer else Remote(url) as client:
            ask = client.runs if by_trainer else lambda: RetryingClient(client).retry(client.runs)
            assert await ask() == []
            with pytest.raises(RemoteError):
                await ask()
    assert statuses == [200]


async def test_a_server_that_fails_again_and_again_ends_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying_remote, "_BACKOFF", Backoff(first_s=0.0, max_s=0.0))
    asked, busy = 0, 100

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({}, status=500 if asked > busy else 503)

    app = web.Application()
    app.router.add_get("/api/runs", answer)
    async with TestServer(app) as server, RetryingRemote(str(server.make_url("")), "", lambda: False) as client:
        with pytest.raises(RemoteError):
            await client.runs()
    assert asked > busy + 20


async def test_no_reply_in_time_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_REPLY_TIMEOUT_S", 0.2)
    over = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    try:
        async with Remote(url) as server:
            with pytest.raises(ReplyTimeout, match=r"did not answer within 0\.2 s"):
                await server.runs()
    finally:
        over.set()
        silent.close()


@pytest.mark.parametrize("status", [200, 400, 502])
async def test_a_reply_that_is_not_utf8_is_a_remote_error(status: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error": {"type": "no", "message": "caf\xe9"}}'
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        async with Remote(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            expected = "does not answer like a Leyden server" if status == 200 else "caf\N{REPLACEMENT CHARACTER}"
            with pytest.raises(RemoteError, match=expected):
                await client.runs()
    finally:
        server.close()


def test_the_command_line_says_which_of_the_two_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--server", f"http://127.0.0.1:{unused_port()}"]) == 1
    assert "cannot reach the server" in (said := capsys.readouterr().err) and "leyden serve" in said
    monkeypatch.setattr(remote, "_REPLY_TIMEOUT_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:  # the kernel accepts, and nobody replies
        assert main(["runs", "--server", f"http://127.0.0.1:{silent.getsockname()[1]}"]) == 1
    assert "did not answer within 0.2 s" in (said := capsys.readouterr().err) and "leyden serve" not in said
