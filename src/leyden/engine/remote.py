"""An engine in another process: the one who has it lends it over a stream, the one who asks has this in its place.

Every message is one frame of MessagePack. The stream's end is the end of the engine.
"""

import asyncio
import itertools
import logging
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import Struct

from leyden.engine.protocol import Engine, EngineError, EngineRequest, SocketAddress, TokenChunk
from leyden.framing import read_frame, to_frame

log = logging.getLogger(__name__)

_GONE = "the engine's process is gone"


class StartGeneration(Struct, frozen=True, tag=True, array_like=True):
    """Draw a completion, which is called `number` from here on."""

    number: int
    request: EngineRequest


class CancelGeneration(Struct, frozen=True, tag=True, array_like=True):
    """Nobody reads that completion any longer."""

    number: int


class EndSession(Struct, frozen=True, tag=True, array_like=True):
    """A session is over."""

    session: str


class GenerationUpdates(Struct, frozen=True, array_like=True):
    """What came of completions since the last message: pieces, and why some failed."""

    pieces: list[tuple[int, TokenChunk]]
    failures: list[tuple[int, str]]


EngineMessage = StartGeneration | CancelGeneration | EndSession


class RemoteEngine:
    """Asks the engine at the other end of a stream."""

    def __init__(self, reader: StreamReader, writer: StreamWriter, address: SocketAddress) -> None:
        self.context_length, self.vocab_size = address.context_length, address.vocab_size
        self._writer = writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Queue[TokenChunk | EngineError]] = {}
        self.ended = asyncio.create_task(self._hear(reader))
        """Done when the other end is gone."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Draw a completion, piece by piece; closing the generator cancels."""
        if self.ended.done():
            raise EngineError(_GONE)
        number = next(self._numbers)
        answers = self._asked[number] = asyncio.Queue()
        finished = False
        try:
            self._say(StartGeneration(number, request))
            while not finished:
                answer = await answers.get()
                finished = isinstance(answer, EngineError) or answer.finish is not None
                if isinstance(answer, EngineError):
                    raise answer
                yield answer
        finally:
            del self._asked[number]
            if not finished:
                self._say(CancelGeneration(number))

    def end_session(self, session: str) -> None:
        """Free what is kept for a session."""
        self._say(EndSession(session))

    def hold(self) -> None:
        """Do nothing: the engine's own process keeps sampling and weight changes apart."""

    def resume(self, version: int) -> None:
        """Do nothing: every chunk names its version."""

    def _say(self, question: EngineMessage) -> None:
        if not self._writer.is_closing():
            self._writer.write(_framed(question))

    async def _hear(self, reader: StreamReader) -> None:
        try:
            async for drawn in _messages(reader, GenerationUpdates):
                for number, piece in drawn.pieces:
                    self._answer(number, piece)
                for number, why in drawn.failures:
                    self._answer(number, EngineError(why))
        finally:
            for number in self._asked:
                self._answer(number, EngineError(_GONE))

    def _answer(self, number: int, answer: TokenChunk | EngineError) -> None:
        if (asked := self._asked.get(number)) is not None:  # a completion that was stopped may have more to say
            asked.put_nowait(answer)


class EngineServer:
    """Answers from an engine of this process what is asked at the other end of a stream."""

    def __init__(self, engine: Engine, writer: StreamWriter) -> None:
        self._engine, self._writer = engine, writer
        self._drawing: dict[int, asyncio.Task[None]] = {}
        self._drawn = GenerationUpdates([], [])

    async def serve(self, reader: StreamReader) -> None:
        """Answer until the other end is gone."""
        try:
            async for question in _messages(reader, EngineMessage):
                match question:
                    case StartGeneration(number, request):
                        self._begin(number, request)
                    case CancelGeneration(number):
                        if (drawing := self._drawing.get(number)) is not None:
                            drawing.cancel()
                    case EndSession(session):
                        self._engine.end_session(session)
        finally:
            self._writer.close()  # whatever ended this, nobody is answered any longer, and they shall hear of it
            left = list(self._drawing.values())
            for drawing in left:
                drawing.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _begin(self, number: int, request: EngineRequest) -> None:
        drawing = self._drawing[number] = asyncio.create_task(self._draw(number, request))
        drawing.add_done_callback(lambda _: self._drawing.pop(number))

    async def _draw(self, number: int, request: EngineRequest) -> None:
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
        drawn, self._drawn = self._drawn, GenerationUpdates([], [])
        if not self._writer.is_closing():
            self._writer.write(_framed(drawn))


_encoder = msgspec.msgpack.Encoder()


def _framed(message: Any) -> bytes:
    return to_frame(_encoder.encode(message))


async def _messages(reader: StreamReader, kind: Any) -> AsyncIterator[Any]:
    """What arrives, until the stream ends, however it does."""
    decoder = msgspec.msgpack.Decoder(kind)
    while (body := await read_frame(reader)) is not None:
        yield decoder.decode(body)
