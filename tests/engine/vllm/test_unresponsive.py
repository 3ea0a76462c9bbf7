"""A vLLM that accepts connections and answers nothing is gone, as one that refuses them."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from leyden.engine.protocol import EngineError
from leyden.engine.vllm import http, process
from leyden.engine.vllm.process import RunningVllm


@pytest_asyncio.fixture
async def silent() -> AsyncIterator[str]:
    """The URL of a server that reads requests and never answers."""
    ended = asyncio.Event()

    async def read(reader: StreamReader, writer: StreamWriter) -> None:
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(read, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    ended.set()
    server.close()


async def test_a_server_that_no_longer_answers_ends_the_run(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_HEALTH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(process, "_RUNNING_POLL_S", 0.01)
    server = RunningVllm(silent)
    async with asyncio.timeout(30):
        with pytest.raises(EngineError, match="no vLLM answers at"):
            await server.start()
        with pytest.raises(EngineError, match="no longer answers"):
            await server.wait_failed()
