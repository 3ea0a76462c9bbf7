"""A service that is a process: a command with a port of its own, started by the worker and lent by its address."""

import asyncio
import os
import socket
import sys
from contextlib import suppress
from typing import Self

from leyden.client.agent_reference import read_command
from leyden.client.processes.environment import without_secrets
from leyden.client.services.pool import ServiceFailed
from leyden.config.schema import ServiceConfig

_PAUSE_S, _ANSWER_S, _LAST_WORDS_S = 0.05, 5.0, 1.0
_LONGEST = 2000


class ProcessService:
    """One such process. It ends with this one, however this one ends (tied.py)."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, config: ServiceConfig, port: int) -> None:
        self._process, self._lifeline, self._port = process, lifeline, port
        self._ready = config.ready and config.ready.replace("{port}", str(port))
        self.lent = config.address.replace("{port}", str(port))
        self._said = ""
        self._announced = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, config: ServiceConfig, base: str) -> Self:
        """Start one and wait until it is ready; raises `ServiceFailed`."""
        assert config.command is not None
        port = _free_port()
        words = read_command(config.command.replace("{port}", str(port)), base)
        theirs, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "leyden.client.processes.lifeline", str(theirs), *words),
                pass_fds=[theirs],
                cwd=base,
                env=without_secrets(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        daemon = cls(process, ours, config, port)
        try:
            await daemon._wait_ready(config.start_limit_s)
        except BaseException:
            await asyncio.shield(daemon.close())
            raise
        return daemon

    async def healthy(self) -> bool:
        """Whether it runs, and answers where it can be asked."""
        return self._process.returncode is None and (self._by_line or await self._answers())

    async def close(self) -> None:
        """End it, with all that it started."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        await self._process.wait()
        await asyncio.wait((self._listening,), timeout=_LAST_WORDS_S)
        self._listening.cancel()

    @property
    def _by_line(self) -> bool:
        return self._ready is not None and not self._ready.startswith(("http://", "https://"))

    async def _wait_ready(self, limit_s: float) -> None:
        exited = asyncio.ensure_future(self._process.wait())
        ready = asyncio.ensure_future(self._announced.wait() if self._by_line else self._until_it_answers())
        try:
            await asyncio.wait((exited, ready), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return
            if exited.done():
                await asyncio.wait((self._listening,), timeout=_LAST_WORDS_S)
            how = f"exit status {exited.result()}" if exited.done() else f"it is not ready within {limit_s:g} s"
            raise ServiceFailed(f"{how}: {self._said.strip()}" if self._said.strip() else how)
        finally:
            exited.cancel()
            ready.cancel()

    async def _until_it_answers(self) -> None:
        while not await self._answers():  # noqa: ASYNC110 - a server tells nobody that it listens
            await asyncio.sleep(_PAUSE_S)

    async def _answers(self) -> bool:
        return await (_port_answers(self._port) if self._ready is None else _url_answers(self._ready))

    async def _listen(self) -> None:
        """Read what it prints, which goes to the worker's own output too."""
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(1 << 16):
            text = data.decode(errors="replace")
            sys.stderr.write(text)
            said = self._said + text
            if self._ready is not None and self._ready in said:
                self._announced.set()
            self._said = said[-_LONGEST:]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def _url_answers(url: str) -> bool:
    import aiohttp  # half of what a host would import, and few ask

    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            return answer.status < 500
    return False


async def _port_answers(port: int) -> bool:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False
