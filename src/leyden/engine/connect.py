"""Connects a server process to the engine at an address."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from leyden.engine.protocol import Engine, EngineAddress, VllmAddress
from leyden.engine.remote import RemoteEngine


@asynccontextmanager
async def connected(
    address: EngineAddress, reader: StreamReader, writer: StreamWriter
) -> AsyncIterator[tuple[Engine, asyncio.Task[None]]]:
    """Yield the engine at an address, and a task that ends when the process that owns the engine is gone.

    The streams are the socket between that process and this one.
    """
    if not isinstance(address, VllmAddress):
        remote = RemoteEngine(reader, writer, address)
        yield remote, remote.ended
        return
    from leyden.engine.vllm.engine import VllmEngine  # aiohttp is slow to import, and the embedded engine needs none

    engine = VllmEngine(address)
    try:
        yield engine, asyncio.create_task(_end_of(reader, writer))
    finally:
        await engine.close()


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
