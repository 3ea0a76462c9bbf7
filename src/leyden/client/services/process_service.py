"""A service that is a command with a port, started by the worker; attempts receive its address."""

import asyncio
import socket
import sys
from contextlib import suppress
from subprocess import PIPE, STDOUT
from typing import Self

from leyden.background import start_background
from leyden.client.agent_process import without_secrets
from leyden.client.services.pool import ServiceFailed
from leyden.config.schema import ServiceConfig
from leyden.decoding import decode_text
from leyden.process.child import ChildProcess
from leyden.process.guardian import Guard
from leyden.user_code.loading import read_command

_POLL_S, _CONNECT_TIMEOUT_S, _LAST_OUTPUT_S = 0.05, 5.0, 1.0
_TERM_TIMEOUT_S = 3.0
_MAX_OUTPUT = 2000


class ProcessService:
    """A running command. It never outlives the worker (see `leyden.process.guardian`)."""

    def __init__(self, process: ChildProcess, config: ServiceConfig, port: int) -> None:
        self._process, self._port = process, port
        self._ready = config.ready and config.ready.replace("{port}", str(port))
        self.handle = config.address.replace("{port}", str(port))
        self._output = ""
        self._announced = asyncio.Event()
        self._reading = start_background(process.read_output(self._on_output), "reading the output of a service")

    @classmethod
    async def start(cls, config: ServiceConfig, base: str) -> Self:
        """Start the command and wait until it is ready; raises `ServiceFailed`."""
        assert config.command is not None
        port = _free_port()
        command = read_command(config.command.replace("{port}", str(port)), base)
        process = ChildProcess(
            command,
            environment=without_secrets(),
            folder=base,
            stdout=PIPE,
            stderr=STDOUT,
            guard=Guard(_TERM_TIMEOUT_S, terminate=True),
        )
        service = cls(process, config, port)
        try:
            await service._wait_ready(config.start_limit_s)
        except BaseException:
            await asyncio.shield(service.close())
            raise
        return service

    async def healthy(self) -> bool:
        """Whether it runs and, unless it announces itself by a line of output, accepts connections."""
        return self._process.status is None and (self._announces_ready or await self._accepts_connections())

    async def close(self) -> None:
        """End it with all its descendants."""
        await self._process.end()
        await asyncio.wait((self._reading,), timeout=_LAST_OUTPUT_S)
        self._reading.cancel()

    @property
    def _announces_ready(self) -> bool:
        """Whether `ready` is a text that it prints, rather than a URL or nothing."""
        return self._ready is not None and not self._ready.startswith(("http://", "https://"))

    async def _wait_ready(self, limit_s: float) -> None:
        exited = asyncio.ensure_future(self._process.wait())
        ready = asyncio.ensure_future(self._announced.wait() if self._announces_ready else self._poll_ready())
        try:
            await asyncio.wait((exited, ready), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return
            if exited.done():
                await asyncio.wait((self._reading,), timeout=_LAST_OUTPUT_S)
            reason = f"exit status {exited.result()}" if exited.done() else f"it is not ready within {limit_s:g} s"
            raise ServiceFailed(f"{reason}: {self._output.strip()}" if self._output.strip() else reason)
        finally:
            exited.cancel()
            ready.cancel()

    async def _poll_ready(self) -> None:
        while not await self._accepts_connections():  # noqa: ASYNC110 - a server does not announce that it listens
            await asyncio.sleep(_POLL_S)

    async def _accepts_connections(self) -> bool:
        return await (_port_is_open(self._port) if self._ready is None else _url_responds(self._ready))

    def _on_output(self, data: bytes) -> None:
        """Copy its output to the worker's own, and watch for the line that announces it as ready."""
        text = decode_text(data)
        sys.stderr.write(text)
        output = self._output + text
        if self._ready is not None and self._ready in output:
            self._announced.set()
        self._output = output[-_MAX_OUTPUT:]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def _url_responds(url: str) -> bool:
    import aiohttp  # slow to import, and most services never need it

    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return response.status < 500
    return False


async def _port_is_open(port: int) -> bool:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False
