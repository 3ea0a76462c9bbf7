"""A server that gives no answer is one error, which says whether it could not be reached or was too slow."""

import asyncio

import pytest

from leyden import remote as remote_module
from leyden.remote import Remote, ServerUnreachable


async def test_a_server_that_nobody_runs_cannot_be_reached() -> None:
    async with Remote("http://127.0.0.1:1") as remote:
        with pytest.raises(ServerUnreachable, match=r"cannot reach the server at http://127\.0\.0\.1:1 \("):
            await remote.runs()


async def test_a_server_that_is_too_slow_is_not_called_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_LONGEST_WAIT_S", 0.1)
    finished = asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await finished.wait()
        writer.close()

    server = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, Remote(f"http://{host}:{port}") as remote:
        with pytest.raises(ServerUnreachable, match=r"did not answer within 0\.1 s"):
            await remote.runs()
        finished.set()
