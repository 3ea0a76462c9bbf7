"""A server that cannot be reached and a server that does not reply in time are different errors."""

import asyncio
import socket
from contextlib import closing

import pytest

from leyden.api import client as remote
from leyden.api.client import Remote, RemoteError, ReplyTimeout, ServerUnreachable
from leyden.cli import main


def unused_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_no_connection_is_an_unreachable_server() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    async with Remote(url) as server:
        with pytest.raises(ServerUnreachable, match=f"cannot reach the server at {url}"):
            await server.list_runs()


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
                await server.list_runs()
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
                await client.list_runs()
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
