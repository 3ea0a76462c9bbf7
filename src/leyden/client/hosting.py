"""A host as its worker sees it: a process that runs attempts, started, heard, and ended.

Its two kinds speak alike: one runs Python agents in itself (host.py), the other one process for each command
(command.py).
"""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

from leyden.client.family import end_marked
from leyden.client.loading import LoadError
from leyden.client.messages import Ended, Printed, Ready, Rewarded, Setup, Start, Stop, Stream, ToWorker, Unready
from leyden.wire import Lease

KEY_VARIABLE = "LEYDEN_KEY"
"""Where a worker finds its own key; no host ever does."""
_MARK_VARIABLE = "LEYDEN_HOST"
"""By which the descendants of a host are known, whatever became of it."""
_END_S, _LAST_WORDS_S, _PRINTED_S = 5.0, 0.2, 1.0
_PAUSE_S, _TRIES = 0.1, 3


class HostDied(Exception):
    """A host died while it loaded the agent; the message says how."""


class HostProcess:
    """One host, from `start` to `close`; it may die in between."""

    def __init__(self, process: subprocess.Popen[bytes], stream: Stream[ToWorker], pool: str | None, mark: str) -> None:
        self._process, self._stream, self._mark = process, stream, mark
        self.pid, self.pool = process.pid, pool
        self._exit = asyncio.ensure_future(asyncio.to_thread(process.wait))
        self._stopping: dict[str, asyncio.Future[str]] = {}

    @classmethod
    async def start(cls, module: str, setup: Setup, pool: str | None = None) -> Self:
        """Start one. A death while it loads the agent may be bad luck; several are the agent's doing: `LoadError`."""
        for _ in range(_TRIES):
            try:
                return await cls._try(module, setup, pool)
            except HostDied as died:
                how = died
                await asyncio.sleep(_PAUSE_S)
        raise LoadError(f"{setup.agent!r} cannot be loaded: its process dies of it ({how})")

    @classmethod
    async def _try(cls, module: str, setup: Setup, pool: str | None) -> Self:
        """Start one and wait until it has loaded the agent; raises `LoadError` or `HostDied` where it has not."""
        ours, theirs = socket.socketpair()
        mark = secrets.token_hex(8)
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**environment(setup.server, setup.key), _MARK_VARIABLE: mark},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # its group is what it started, and a terminal's Ctrl-C is the worker's matter
            )
        host = cls(process, await Stream.over(ours, ToWorker), pool, mark)
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

    def run(self, lease: Lease) -> None:
        """Have an attempt run."""
        attempt, key = lease.attempt, "" if self.pool is not None else lease.key
        self._stream.send(
            Start(attempt.id, attempt.rollout, lease.traceparent, lease.task.input, run=attempt.run, key=key)
        )

    async def stop(self, attempt: str) -> str:
        """Have an attempt stopped; what it has printed, unless the host is too busy to say."""
        printed = self._stopping[attempt] = asyncio.get_running_loop().create_future()
        self._stream.send(Stop(attempt))
        try:
            return await asyncio.wait_for(printed, _PRINTED_S)
        except TimeoutError:
            return ""
        finally:
            del self._stopping[attempt]

    async def listen(self, hear: Callable[[Ended | Rewarded], None]) -> None:
        """Hear of every reward, and of every attempt whose code has returned, until the host has died."""
        reading = asyncio.ensure_future(self._read(hear))
        try:
            await asyncio.wait((reading, self._exit), return_when=asyncio.FIRST_COMPLETED)
            # what it said before it died is still to be read, but a process that an agent forked may hold the socket
            await asyncio.wait((reading,), timeout=_LAST_WORDS_S)
        finally:
            reading.cancel()

    async def _read(self, hear: Callable[[Ended | Rewarded], None]) -> None:
        while (message := await self._stream.receive()) is not None:
            if isinstance(message, Printed):
                waiting = self._stopping.get(message.attempt)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message.output)
            else:
                assert isinstance(message, Ended | Rewarded)
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
        await end_marked(f"{_MARK_VARIABLE}={self._mark}\0".encode())


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
