"""Connects a server process to the engine at an address."""

import asyncio
from asyncio import StreamReader, StreamWriter

from leyden.engine.protocol import Engine, EngineAddress, VllmAddress
from leyden.engine.remote import RemoteEngine
from leyden.engine.vllm.engine import VllmEngine


def connect(address: EngineAddress, reader: StreamReader, writer: StreamWriter) -> tuple[Engine, asyncio.Task[None]]:
    """Return the engine at an address, and a task that ends when the process that owns the engine is gone.

    The streams are the socket between that process and this one.
    """
    if isinstance(address, VllmAddress):
        return VllmEngine(address), asyncio.create_task(_end_of(reader, writer))
    engine = RemoteEngine(reader, writer, address)
    return engine, engine.ended


def describe_address(address: EngineAddress) -> str:
    """Return where an engine runs, for people."""
    if not isinstance(address, VllmAddress):
        return "embedded"
    return f"vLLM at {address.location}" if address.location.startswith("http") else "vLLM"


async def _end_of(reader: StreamReader, writer: StreamWriter) -> None:
    """Wait until the other end is gone. A writer that nobody holds would close the connection."""
    while await reader.read(1 << 16):
        pass
    writer.close()
