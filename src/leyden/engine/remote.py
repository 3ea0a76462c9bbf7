"""An engine in another process: `EngineServer` serves it over a stream, `RemoteEngine` is its client.

Every message is one frame of MessagePack. When the stream ends, the engine is gone; `SocketEngine` connects again.
"""

import asyncio
import itertools
import logging
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import msgspec
from msgspec import Struct

from leyden.engine.protocol import (
    Engine,
    EngineAddress,
    EngineError,
    EngineLost,
    EngineRequest,
    ReplicasAddress,
    SocketAddress,
    TokenChunk,
    VllmAddress,
)
from leyden.engine.router import Replica, ReplicaRouter
from leyden.process.framing import read_frame, to_frame

log = logging.getLogger(__name__)

_GONE = "the engine's process is gone"


class StartGeneration(Struct, frozen=True, tag=True, array_like=True):
    """Sample a completion; later messages name it by its number."""

    number: int
    request: EngineRequest


class CancelGeneration(Struct, frozen=True, tag=True, array_like=True):
    """Stop sampling a completion."""

    number: int


class EndSession(Struct, frozen=True, tag=True, array_like=True):
    """Free what the engine keeps for a session."""

    session: str


class GenerationUpdates(Struct, frozen=True, array_like=True):
    """The chunks since the last message and the errors of failed completions, each with the completion's number."""

    chunks: list[tuple[int, TokenChunk]]
    failures: list[tuple[int, str, bool]]
    """The last: whether the engine has ended."""


EngineMessage = StartGeneration | CancelGeneration | EndSession


class UnheldEngine:
    """The embedded engine, wherever it runs: it keeps sampling and weight changes apart by itself."""

    reports_allowed_mass = True

    def hold(self) -> None:
        """Do nothing."""

    def resume(self, version: int) -> None:
        """Do nothing: every chunk names its version."""


class RemoteEngine(UnheldEngine):
    """The client of an engine at the other end of a stream."""

    def __init__(self, reader: StreamReader, writer: StreamWriter, address: SocketAddress) -> None:
        self.context_length, self.vocab_size = address.context_length, address.vocab_size
        self._writer = writer
        self._numbers = itertools.count()
        self._outputs: dict[int, asyncio.Queue[TokenChunk | EngineError]] = {}
        self.ended = asyncio.create_task(self._receive(reader))
        """Done when the other end is gone."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a completion, chunk by chunk; closing the generator cancels the request."""
        if self.ended.done():
            raise EngineLost(_GONE)
        number = next(self._numbers)
        outputs = self._outputs[number] = asyncio.Queue()
        finished = False
        try:
            self._send(StartGeneration(number, request))
            while not finished:
                output = await outputs.get()
                finished = isinstance(output, EngineError) or output.finish is not None
                if isinstance(output, EngineError):
                    raise output
                yield output
        finally:
            del self._outputs[number]
            if not finished:
                self._send(CancelGeneration(number))

    def end_session(self, session: str) -> None:
        """Free what is kept for a session."""
        self._send(EndSession(session))

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    def _send(self, message: EngineMessage) -> None:
        if not self._writer.is_closing():
            self._writer.write(_framed(message))

    async def _receive(self, reader: StreamReader) -> None:
        try:
            async for updates in _messages(reader, GenerationUpdates):
                for number, chunk in updates.chunks:
                    self._deliver(number, chunk)
                for number, message, lost in updates.failures:
                    self._deliver(number, EngineLost(message) if lost else EngineError(message))
        finally:
            for number in self._outputs:
                self._deliver(number, EngineLost(_GONE))

    def _deliver(self, number: int, output: TokenChunk | EngineError) -> None:
        if (outputs := self._outputs.get(number)) is not None:  # None: it was cancelled, and this was on its way
            outputs.put_nowait(output)


class SocketEngine(UnheldEngine):
    """The client of an engine that listens on a Unix socket; it connects again if that was started again."""

    def __init__(self, address: SocketAddress) -> None:
        self.context_length, self.vocab_size = address.context_length, address.vocab_size
        self._address = address
        self._connecting = asyncio.Lock()
        self._remote: RemoteEngine | None = None

    async def close(self) -> None:
        """Close the connection; requests in flight fail."""
        if self._remote is not None:
            self._remote.close()
            await self._remote.ended

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a completion, chunk by chunk. Raises `EngineLost` if nothing listens."""
        remote = await self._connected()
        async with aclosing(remote.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def is_ready(self) -> bool:
        """Whether the engine listens."""
        try:
            await self._connected()
        except EngineLost:
            return False
        return True

    def end_session(self, session: str) -> None:
        """Free what is kept for a session."""
        if self._remote is not None:
            self._remote.end_session(session)

    async def _connected(self) -> RemoteEngine:
        async with self._connecting:
            if self._remote is None or self._remote.ended.done():
                try:
                    streams = await asyncio.open_unix_connection(self._address.location)
                except OSError as error:
                    raise EngineLost(_GONE) from error
                self._remote = RemoteEngine(*streams, self._address)
            return self._remote


class EngineServer:
    """Serves an engine of this process to the client at the other end of a stream."""

    def __init__(self, engine: Engine, writer: StreamWriter) -> None:
        self._engine, self._writer = engine, writer
        self._generations: dict[int, asyncio.Task[None]] = {}
        self._updates = GenerationUpdates([], [])

    async def serve(self, reader: StreamReader) -> None:
        """Serve until the other end is gone."""
        try:
            async for message in _messages(reader, EngineMessage):
                match message:
                    case StartGeneration(number, request):
                        self._start(number, request)
                    case CancelGeneration(number):
                        if (generation := self._generations.get(number)) is not None:
                            generation.cancel()
                    case EndSession(session):
                        self._engine.end_session(session)
        finally:
            self._writer.close()  # whatever ended this: the client must see that no more chunks come
            remaining = list(self._generations.values())
            for generation in remaining:
                generation.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)

    def _start(self, number: int, request: EngineRequest) -> None:
        generation = self._generations[number] = asyncio.create_task(self._generate(number, request))
        generation.add_done_callback(lambda _: self._generations.pop(number))

    async def _generate(self, number: int, request: EngineRequest) -> None:
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    self._send_soon()
                    self._updates.chunks.append((number, chunk))
        except Exception as error:
            if not isinstance(error, EngineError):
                log.exception("the engine raised an unexpected error")
            self._send_soon()
            message = str(error) or type(error).__name__
            self._updates.failures.append((number, message, isinstance(error, EngineLost)))

    def _send_soon(self) -> None:
        """Send one message for all chunks of this iteration of the event loop, usually those of a whole step."""
        if not self._updates.chunks and not self._updates.failures:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        updates, self._updates = self._updates, GenerationUpdates([], [])
        if not self._writer.is_closing():
            self._writer.write(_framed(updates))


async def refuse_all(reader: StreamReader, writer: StreamWriter, why: str) -> None:
    """Fail every request of the client at the other end of a stream until that is gone: there is no engine."""
    async for message in _messages(reader, EngineMessage):
        if isinstance(message, StartGeneration):
            writer.write(_framed(GenerationUpdates([], [(message.number, why, False)])))
    writer.close()


_encoder = msgspec.msgpack.Encoder()


def _framed(message: Any) -> bytes:
    return to_frame(_encoder.encode(message))


async def _messages(reader: StreamReader, kind: Any) -> AsyncIterator[Any]:
    """Decode messages until the stream ends."""
    decoder = msgspec.msgpack.Decoder(kind)
    while (body := await read_frame(reader)) is not None:
        yield decoder.decode(body)


@asynccontextmanager
async def connected(
    address: EngineAddress, reader: StreamReader, writer: StreamWriter
) -> AsyncIterator[tuple[Engine, asyncio.Task[None]]]:
    """Yield the engine at an address, and a task that ends when the process that owns the engine is gone.

    The streams are the socket between that process and this one.
    """
    if isinstance(address, SocketAddress):
        remote = RemoteEngine(reader, writer, address)
        yield remote, remote.ended
        return
    async with AsyncExitStack() as opened:
        if isinstance(address, VllmAddress):
            engine: Engine = _open_replica(address, opened)
        else:
            engine = ReplicaRouter([_open_replica(replica, opened) for replica in address.replicas])
            opened.push_async_callback(engine.close)
        yield engine, asyncio.create_task(wait_end(reader, writer))


def _open_replica(address: SocketAddress | VllmAddress, opened: AsyncExitStack) -> Replica:
    if isinstance(address, SocketAddress):
        socket = SocketEngine(address)
        opened.push_async_callback(socket.close)
        return socket
    from leyden.engine.vllm.engine import VllmEngine  # aiohttp is slow to import, and the embedded engine needs none

    vllm = VllmEngine(address)
    opened.push_async_callback(vllm.close)
    return vllm


def describe_address(address: EngineAddress) -> str:
    """Return where an engine runs, for people."""
    if isinstance(address, ReplicasAddress):
        shown, count = describe_address(address.replicas[0]), len(address.replicas)
        return f"{count} x {shown}" if count > 1 else shown
    if isinstance(address, SocketAddress):
        return "embedded"
    return f"vLLM at {address.location}" if address.location.startswith("http") else "vLLM"


class SeparateEngine:
    """An engine in a process of its own, as the training process uses it: it has a copy of the weights."""

    shares_parameters = False
    sleeps_while_training = False

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Wait until the server process is gone; it connects to the engine directly."""
        await wait_end(reader, writer)

    async def sleep(self) -> None:
        """Do nothing: `sleeps_while_training` is False."""

    @asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        """Let the trainer write its parameters."""
        yield


async def wait_end(reader: StreamReader, writer: StreamWriter) -> None:
    """Wait until the other end is gone. A writer that nobody holds would close the connection."""
    while await reader.read(1 << 16):
        pass
    writer.close()
