"""A host as its worker sees it: started with an environment in which any client finds the model, heard, and ended."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

from leyden.client.loading import LoadError
from leyden.client.messages import Ended, Ready, Setup, Start, Stop, Stream, Unready

KEY_VARIABLE = "LEYDEN_KEY"
"""Where a worker finds its own key; no host ever does."""
_END_S, _LAST_WORDS_S = 5.0, 0.2


class HostDied(Exception):
    """A host died while it loaded the agent; the message says how."""


class HostProcess:
    """One host, from `start` to `close`; it may die in between."""

    def __init__(self, process: subprocess.Popen[bytes], stream: Stream) -> None:
        self._process, self._stream = process, stream
        self.pid = process.pid
        self._exit = asyncio.ensure_future(asyncio.to_thread(process.wait))

    @classmethod
    async def start(cls, setup: Setup) -> Self:
        """Start one and wait until it has loaded the agent; raises `LoadError` or `HostDied` where it has not."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [sys.executable, "-m", "leyden.client.host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment(setup.server, setup.key),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # its group is what it started, and a terminal's Ctrl-C is the worker's matter
            )
        host = cls(process, await Stream.over(ours))
        try:
            host._stream.send(setup)
            match await host._stream.receive():
                case Ready():
                    return host
                case Unready(message):
                    raise LoadError(message)
                case _:
                    raise HostDied(await host.death())
        except BaseException:
            await asyncio.shield(host.close())
            raise

    def run(self, start: Start) -> None:
        """Have an attempt run."""
        self._stream.send(start)

    def stop(self, attempt: str) -> None:
        """Have an attempt stopped."""
        self._stream.send(Stop(attempt))

    async def listen(self, hear: Callable[[Ended], None]) -> None:
        """Hear of every attempt whose code has returned, until the host has died."""
        reading = asyncio.ensure_future(self._read(hear))
        try:
            await asyncio.wait((reading, self._exit), return_when=asyncio.FIRST_COMPLETED)
            # what it said before it died is still to be read, but a process that an agent forked may hold the socket
            await asyncio.wait((reading,), timeout=_LAST_WORDS_S)
        finally:
            reading.cancel()

    async def _read(self, hear: Callable[[Ended], None]) -> None:
        while (message := await self._stream.receive()) is not None:
            assert isinstance(message, Ended)
            hear(message)

    async def death(self) -> str:
        """How the process ended, in words."""
        code = await asyncio.shield(self._exit)
        if code >= 0:
            return f"exit status {code}"
        return f"killed by {signal.Signals(-code).name}"

    async def close(self) -> None:
        """End the host and all that it started."""
        self._stream.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exit), _END_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.shield(self._exit)


def environment(server: str, key: str) -> dict[str, str]:
    """The variables by which the clients of an agent find the model, beside those of the worker."""
    inherited = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    direct = ",".join(filter(None, (inherited.get("NO_PROXY") or inherited.get("no_proxy"), urlsplit(server).hostname)))
    return {
        **inherited,
        "OPENAI_BASE_URL": f"{server}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": server,
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": direct,
        "no_proxy": direct,
        "PYTHONUNBUFFERED": "1",  # what an agent printed is there even if its process is killed
    }
