"""From an engine's address to the engine, in a server process."""

import asyncio
from asyncio import StreamReader, StreamWriter

from leyden.engine.protocol import Engine, EngineAddress
from leyden.engine.remote import RemoteEngine


def connect(address: EngineAddress, reader: StreamReader, writer: StreamWriter) -> tuple[Engine, asyncio.Task[None]]:
    """The engine at an address, and a task that ends when the process that owns the engine is gone.

    The streams are the socket between that process and this one.
    """
    engine = RemoteEngine(reader, writer, address)
    return engine, engine.ended
