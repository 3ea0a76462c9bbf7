"""An engine behind a socket is the engine: the same pieces, errors and cancellations, and everybody hears its end."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import pytest
from modelserving import eventually

from leyden.engine.protocol import EngineError, EngineRequest, SocketAddress, TokenChunk
from leyden.engine.remote import EngineServer, RemoteEngine
from leyden.engine.scripted import ScriptedEngine
from leyden.records import Sampling

SECONDS = 10


def ask(number: int, tokens: int = 20) -> EngineRequest:
    return EngineRequest((number, 7), Sampling(), (), tokens, f"session-{number}", top_logprobs=number % 2)


def script(request: EngineRequest) -> Sequence[int]:
    first = request.prompt_ids[0]
    return [-1] if first == 666 else [first * 100 + at for at in range(20)]


async def all_of(engine: RemoteEngine | ScriptedEngine, request: EngineRequest) -> list[TokenChunk]:
    return [piece async for piece in engine.generate(request)]


class Line:
    """An engine, its lender, and who asks, with a socket between them."""

    async def open(self, delay_s: float = 0.0) -> "Line":
        self.engine = ScriptedEngine(script, delay_s=delay_s)
        one, other = socket.socketpair()
        reader, self.writer = await asyncio.open_connection(sock=one)
        self.lending = asyncio.create_task(EngineServer(self.engine, self.writer).serve(reader))
        asking, self.asking = await asyncio.open_connection(sock=other)
        self.distant = RemoteEngine(asking, self.asking, SocketAddress(1000, 500, 8))
        return self

    async def close(self) -> None:
        self.asking.close()
        self.writer.close()
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(self.lending, self.distant.ended)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    opened = await Line().open()
    yield opened
    await opened.close()


@pytest.fixture
async def slow() -> AsyncIterator[Line]:
    opened = await Line().open(delay_s=0.05)
    yield opened
    await opened.close()


async def test_many_at_once_are_answered_as_the_engine_answers(line: Line) -> None:
    requests = [ask(number) for number in range(50)]
    answers = await asyncio.gather(*(all_of(line.distant, request) for request in requests))
    assert answers == [await all_of(ScriptedEngine(script), request) for request in requests]
    assert sorted(line.engine.asked, key=lambda request: request.prompt_ids) == requests
    assert (line.distant.context_length, line.distant.vocab_size) == (1000, 500)


async def test_one_that_fails_says_why_and_disturbs_nobody(line: Line) -> None:
    good, bad = await asyncio.gather(
        all_of(line.distant, ask(1)), all_of(line.distant, ask(666)), return_exceptions=True
    )
    assert isinstance(good, list)
    assert isinstance(bad, EngineError)
    assert str(bad) == "the script says that the engine dies here"


async def test_an_engine_that_fails_with_anything_else_keeps_nobody_waiting(line: Line) -> None:
    async def broken(request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        raise ZeroDivisionError("a bug")
        yield

    line.engine.generate = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="a bug"):
        await all_of(line.distant, ask(1))


async def test_who_goes_away_stops_the_engine(slow: Line) -> None:
    async with aclosing(slow.distant.generate(ask(1))) as pieces:
        await anext(pieces)
    await eventually(lambda: slow.engine.cancelled == 1)
    assert len(await all_of(slow.distant, ask(2))) == 5


async def test_a_completion_that_is_over_is_not_stopped(line: Line) -> None:
    await all_of(line.distant, ask(1))
    line.distant.end_session("over")
    await eventually(lambda: line.engine.ended_sessions == ["over"])
    assert line.engine.cancelled == 0


async def test_when_the_engine_is_gone_everybody_hears_of_it(slow: Line) -> None:
    asked = [asyncio.create_task(all_of(slow.distant, ask(number))) for number in range(3)]
    await eventually(lambda: len(slow.engine.asked) == 3)
    slow.writer.close()
    async with asyncio.timeout(SECONDS):
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in found] == ["the engine's process is gone"] * 3
    assert all(isinstance(error, EngineError) for error in found)
    with pytest.raises(EngineError, match="gone"):
        await all_of(slow.distant, ask(4))
    slow.distant.end_session("nobody hears this, and nobody minds")


async def test_when_the_asker_is_gone_nothing_more_is_drawn(slow: Line) -> None:
    asked = [asyncio.create_task(all_of(slow.distant, ask(number))) for number in range(3)]
    await eventually(lambda: len(slow.engine.asked) == 3)
    slow.asking.close()
    async with asyncio.timeout(SECONDS):
        await slow.lending
    assert slow.engine.cancelled == 3
    await asyncio.gather(*asked, return_exceptions=True)
