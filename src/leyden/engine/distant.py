"""An engine in another process: the one who has it lends it over a stream, the one who asks has this in its place.

Every message is its length in four bytes and so much MessagePack. The stream's end is the end of the engine.
"""

import asyncio
import itertools
import logging
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from msgspec import Struct

from leyden.engine import Engine, EngineError, Generate, Piece

log = logging.getLogger(__name__)

_LENGTH = 4
_GONE = "the engine's process is gone"


class Ask(Struct, frozen=True, tag=True, array_like=True):
    """Draw a completion, which is called `number` from here on."""

    number: int
    request: Generate


class Stop(Struct, frozen=True, tag=True, array_like=True):
    """Nobody reads that completion any longer."""

    number: int


class Forget(Struct, frozen=True, tag=True, array_like=True):
    """A session is over."""

    session: str


class Drawn(Struct, frozen=True, array_like=True):
    """What came of completions since the last message: pieces, and why some failed."""

    pieces: list[tuple[int, Piece]]
    failures: list[tuple[int, str]]


Question = Ask | Stop | Forget


class DistantEngine:
    """Asks the engine at the other end of a stream."""

    def __init__(self, reader: StreamReader, writer: StreamWriter, context: int, vocabulary: int) -> None:
        self.context, self.vocabulary = context, vocabulary
        self._writer = writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Queue[Piece | EngineError]] = {}
        self.ended = asyncio.create_task(self._hear(reader))
        """Done when the other end is gone."""

    async def generate(self, request: Generate) -> AsyncGenerator[Piece, None]:
        """Draw a completion, piece by piece; closing the generator cancels."""
        if self.ended.done():
            raise EngineError(_GONE)
        number = next(self._numbers)
        answers = self._asked[number] = asyncio.Queue()
        finished = False
        try:
            self._say(Ask(number, request))
            while not finished:
                answer = await answers.get()
                finished = isinstance(answer, EngineError) or answer.finish is not None
                if isinstance(answer, EngineError):
                    raise answer
                yield answer
        finally:
            del self._asked[number]
            if not finished:
                self._say(Stop(number))

    def forget(self, session: str) -> None:
        """Let go of what is kept for a session."""
        self._say(Forget(session))

    def _say(self, question: Question) -> None:
        if not self._writer.is_closing():
            self._writer.write(_framed(question))

    async def _hear(self, reader: StreamReader) -> None:
        try:
            async for drawn in _messages(reader, Drawn):
                for number, piece in drawn.pieces:
                    self._answer(number, piece)
                for number, why in drawn.failures:
                    self._answer(number, EngineError(why))
        finally:
            for number in self._asked:
                self._answer(number, EngineError(_GONE))

    def _answer(self, number: int, answer: Piece | EngineError) -> None:
        if (asked := self._asked.get(number)) is not None:  # a completion that was stopped may have more to say
            asked.put_nowait(answer)


class Lender:
    """Answers from an engine of this process what is asked at the other end of a stream."""

    def __init__(self, engine: Engine, writer: StreamWriter) -> None:
        self._engine, self._writer = engine, writer
        self._drawing: dict[int, asyncio.Task[None]] = {}
        self._drawn = Drawn([], [])

    async def lend(self, reader: StreamReader) -> None:
        """Answer until the other end is gone."""
        try:
            async for question in _messages(reader, Question):
                match question:
                    case Ask(number, request):
                        self._begin(number, request)
                    case Stop(number):
                        if (drawing := self._drawing.get(number)) is not None:
                            drawing.cancel()
                    case Forget(session):
                        self._engine.forget(session)
        finally:
            self._writer.close()  # whatever ended this, nobody is answered any longer, and they shall hear of it
            left = list(self._drawing.values())
            for drawing in left:
                drawing.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _begin(self, number: int, request: Generate) -> None:
        drawing = self._drawing[number] = asyncio.create_task(self._draw(number, request))
        drawing.add_done_callback(lambda _: self._drawing.pop(number))

    async def _draw(self, number: int, request: Generate) -> None:
        try:
            async with aclosing(self._engine.generate(request)) as pieces:
                async for piece in pieces:
                    self._send_soon()
                    self._drawn.pieces.append((number, piece))
        except Exception as error:
            if not isinstance(error, EngineError):
                log.exception("an engine failed in a way that it should not")
            self._send_soon()
            self._drawn.failures.append((number, str(error) or type(error).__name__))

    def _send_soon(self) -> None:
        """An engine hands over what a step drew for all of its requests at once: that is one message."""
        if not self._drawn.pieces and not self._drawn.failures:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        drawn, self._drawn = self._drawn, Drawn([], [])
        if not self._writer.is_closing():
            self._writer.write(_framed(drawn))


_encoder = msgspec.msgpack.Encoder()


def _framed(message: Any) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH, "big") + body


async def _messages(reader: StreamReader, kind: Any) -> AsyncIterator[Any]:
    """What arrives, until the stream ends, however it does."""
    decoder = msgspec.msgpack.Decoder(kind)
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
            yield decoder.decode(await reader.readexactly(length))
