"""The server beside a trainer, in a process of its own: what it does for the agents costs the engine no turn.

Model calls come back from it over a socket to the engine here. It ends with this process, however that ends.
"""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

from leyden.background import start_background
from leyden.config import ConfigError
from leyden.engine.protocol import EngineBackend
from leyden.server.options import REFUSED, RunningServer, ServerProcessOptions
from leyden.trainer.errors import TrainingError

_LONGEST_END_S = 40.0
"""A server gives what it accepted half a minute."""


class LocalServer:
    """A server's process, and where it listens."""

    def __init__(self, process: Process, running: RunningServer, log: "_Log") -> None:
        self._process, self._log = process, log
        self.running = running

    async def failed(self) -> NoReturn:
        """Wait until it has ended although nobody told it to, and say how."""
        raise TrainingError(f"the server ended ({_how(await self._process.wait())}): {self._log.last_words()}")


@asynccontextmanager
async def server_beside(options: ServerProcessOptions, engine: EngineBackend, log: Path) -> AsyncIterator[LocalServer]:
    """A server that answers model calls from an engine of this process, within this context."""
    ours, its = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    serving = start_background(engine.serve(reader, writer), "serving the engine to the server process")
    said = _Log(log)
    try:
        with its, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                # without -P a file of the user's may stand in for one of ours
                *(sys.executable, "-P", "-m", "leyden.server", str(its.fileno())),
                pass_fds=[its.fileno()],
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield LocalServer(process, await _started(process, options, said), said)
        finally:
            await _end(process)
    finally:
        writer.close()
        serving.cancel()


async def _started(process: Process, options: ServerProcessOptions, said: "_Log") -> RunningServer:
    """Where it listens, once it does."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(options.to_json().encode() + b"\n")
    if line := await process.stdout.readline():
        return msgspec.json.decode(line, type=RunningServer)
    status = await process.wait()
    if status == REFUSED:
        raise ConfigError(f"`server`: {said.last_words()}")
    raise TrainingError(f"the server did not start ({_how(status)}): {said.last_words()}")


async def _end(process: Process) -> None:
    """Have it finish what it accepted; if that takes too long, end it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _LONGEST_END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


class _Log:
    """What a server writes from now on to a file that others may have written to before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = path.stat().st_size if path.exists() else 0

    def last_words(self) -> str:
        """The last of it, and where the rest is."""
        said = self._path.read_bytes()[self._before :].decode(errors="replace").strip()
        return f"{said.splitlines()[-1]} ({self._path})" if said else f"it left no word in {self._path}"


def _how(status: int) -> str:
    return f"status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
