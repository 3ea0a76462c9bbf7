"""The server beside a trainer, in a process of its own: what it does for the agents costs the engine no turn.

Model calls come back from it over a socket to the engine here. It ends with this process, however that ends.
"""

import asyncio
import signal
import socket
import sys
from asyncio import StreamReader
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

from leyden.config import ConfigError
from leyden.engine import Engine
from leyden.engine.distant import Lender
from leyden.server.options import Beside, Running
from leyden.trainer.errors import TrainingError

_REFUSED = 2
"""The exit status of a server that cannot serve, whatever is tried."""


class LocalServer:
    """A server's process, and where it listens."""

    def __init__(self, process: Process, running: Running, log: Path) -> None:
        self._process, self._log = process, log
        self.running = running

    async def failed(self) -> NoReturn:
        """Wait until it has ended although nobody told it to, and say how."""
        raise TrainingError(f"the server ended ({_how(await self._process.wait())}): {_last_words(self._log)}")


@asynccontextmanager
async def server_beside(options: Beside, engine: Engine, log: Path) -> AsyncIterator[LocalServer]:
    """A server that answers model calls from an engine of this process, within this context."""
    ours, its = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    lending = asyncio.create_task(Lender(engine, writer).lend(reader))
    try:
        with its, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "leyden.server", options.to_json(), str(its.fileno())),
                pass_fds=[its.fileno()],
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal is for the one who trains, who may need its answers yet
            )
        try:
            assert process.stdout is not None
            yield LocalServer(process, await _started(process, process.stdout, log), log)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
    finally:
        writer.close()
        lending.cancel()


async def _started(process: Process, output: StreamReader, log: Path) -> Running:
    """Where it listens, once it does."""
    if line := await output.readline():
        return msgspec.json.decode(line, type=Running)
    status = await process.wait()
    words = _last_words(log)
    raise (
        ConfigError(f"`server`: {words}")
        if status == _REFUSED
        else TrainingError(f"the server did not start ({_how(status)}): {words}")
    )


def _how(status: int) -> str:
    return f"status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it left nothing in {log}"
