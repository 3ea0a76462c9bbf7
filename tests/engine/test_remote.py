"""A remote engine behaves as the engine itself: same chunks, errors and cancellations; its end fails all requests."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import pytest
from modelserving import eventually
from scripted_engine import ScriptedEngine

from leyden.engine.protocol import EngineError, EngineLost, EngineRequest, SocketAddress, TokenChunk
from leyden.engine.remote import EngineServer, RemoteEngine
from leyden.records import Sampling

SECONDS = 10


def make_request(number: int, tokens: int = 20) -> EngineRequest:
    return EngineRequest((number, 7), Sampling(), (), tokens, f"session-{number}", top_logprobs=number % 2)


def script(request: EngineRequest) -> Sequence[int]:
    first = request.prompt_ids[0]
    return [-1] if first == 666 else [first * 100 + at for at in range(20)]


async def all_of(engine: RemoteEngine | ScriptedEngine, request: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


class Connection:
    """An engine, its server and its client, with a socket between them."""

    async def open(self, delay_s: float = 0.0) -> "Connection":
        self.engine = ScriptedEngine(script, delay_s=delay_s)
        one, other = socket.socketpair()
        reader, self.writer = await asyncio.open_connection(sock=one)
        self.serving = asyncio.create_task(EngineServer(self.engine, self.writer).serve(reader))
        reader, self.client_writer = await asyncio.open_connection(sock=other)
        self.remote = RemoteEngine(reader, self.client_writer, SocketAddress(1000, 500, 8))
        return self

    async def close(self) -> None:
        self.client_writer.close()
        self.writer.close()
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(self.serving, self.remote.ended)


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    opened = await Connection().open()
    yield opened
    await opened.close()


@pytest.fixture
async def slow() -> AsyncIterator[Connection]:
    opened = await Connection().open(delay_s=0.05)
    yield opened
    await opened.close()


async def test_many_requests_at_once_get_the_chunks_of_the_engine(connection: Connection) -> None:
    requests = [make_request(number) for number in range(50)]
    answers = await asyncio.gather(*(all_of(connection.remote, request) for request in requests))
    assert answers == [await all_of(ScriptedEngine(script), request) for request in requests]
    assert sorted(connection.engine.requests, key=lambda request: request.prompt_ids) == requests
    assert (connection.remote.context_length, connection.remote.vocab_size) == (1000, 500)


async def test_a_request_that_fails_says_why_and_others_continue(connection: Connection) -> None:
    good, bad = await asyncio.gather(
        all_of(connection.remote, make_request(1)), all_of(connection.remote, make_request(666)), return_exceptions=True
    )
    assert isinstance(good, list)
    assert isinstance(bad, EngineError)
    assert str(bad) == "the script makes the engine fail here" and not isinstance(bad, EngineLost)


async def test_an_unexpected_error_of_the_engine_fails_the_request(connection: Connection) -> None:
    async def broken(request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        raise ZeroDivisionError("a bug")
        yield

    connection.engine.generate = broken
    with pytest.raises(EngineError, match="a bug"):
        await all_of(connection.remote, make_request(1))


async def test_a_request_learns_that_the_engine_ended_in_a_process_that_goes_on(connection: Connection) -> None:
    async def ended(request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        raise EngineLost("the engine has ended")
        yield

    connection.engine.generate = ended
    with pytest.raises(EngineLost, match="the engine has ended"):
        await all_of(connection.remote, make_request(1))


async def test_closing_the_stream_cancels_the_request(slow: Connection) -> None:
    async with aclosing(slow.remote.generate(make_request(1))) as chunks:
        await anext(chunks)
    await eventually(lambda: slow.engine.cancelled == 1)
    assert len(await all_of(slow.remote, make_request(2))) == 5


async def test_a_finished_completion_is_not_cancelled(connection: Connection) -> None:
    await all_of(connection.remote, make_request(1))
    connection.remote.end_session("over")
    await eventually(lambda: connection.engine.ended_sessions == ["over"])
    assert connection.engine.cancelled == 0


async def test_when_the_engine_is_gone_all_requests_fail(slow: Connection) -> None:
    generations = [asyncio.create_task(all_of(slow.remote, make_request(number))) for number in range(3)]
    await eventually(lambda: len(slow.engine.requests) == 3)
    slow.writer.close()
    async with asyncio.timeout(SECONDS):
        found = await asyncio.gather(*generations, return_exceptions=True)
    assert [str(error) for error in found] == ["the engine's process is gone"] * 3
    assert all(isinstance(error, EngineLost) for error in found)
    with pytest.raises(EngineLost, match="gone"):
        await all_of(slow.remote, make_request(4))
    slow.remote.end_session("nobody hears this, and nobody minds")


async def test_when_the_client_is_gone_its_requests_are_cancelled(slow: Connection) -> None:
    generations = [asyncio.create_task(all_of(slow.remote, make_request(number))) for number in range(3)]
    await eventually(lambda: len(slow.engine.requests) == 3)
    slow.client_writer.close()
    async with asyncio.timeout(SECONDS):
        await slow.serving
    assert slow.engine.cancelled == 3
    await asyncio.gather(*generations, return_exceptions=True)
