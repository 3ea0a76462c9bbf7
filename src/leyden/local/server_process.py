"""Runs the server of a local run in its own process, so that it does not compete with the engine for Python's lock.

The server reaches the engine over a socket to this process, and ends with this process, however that ends.
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
from leyden.local.log_tail import LogTail
from leyden.server.options import REFUSED, RunningServer, ServerProcessOptions
from leyden.trainer.errors import TrainingError

_STOP_TIMEOUT_S = 40.0
"""A server gives the requests that it accepted half a minute."""


class LocalServer:
    """A running server process."""

    def __init__(self, process: Process, running: RunningServer, output: LogTail) -> None:
        self._process, self._output = process, output
        self.running = running

    async def wait_failed(self) -> NoReturn:
        """Wait until the process ends before it is stopped, and raise an error that says how."""
        raise TrainingError(
            f"the server ended ({_exit_reason(await self._process.wait())}): {_last_line(self._output)}"
        )


@asynccontextmanager
async def running_server(
    options: ServerProcessOptions, engine: EngineBackend, log_file: Path
) -> AsyncIterator[LocalServer]:
    """Start a server whose model calls go to an engine of this process; stop it at the end of the context."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    serving = start_background(engine.serve(reader, writer), "serving the engine to the server process")
    output = LogTail(log_file)
    try:
        with theirs, log_file.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                # without -P a file of the user may shadow one of ours
                *(sys.executable, "-P", "-m", "leyden.server", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=PIPE,
                stdout=PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            yield LocalServer(process, await _wait_ready(process, options, output), output)
        finally:
            await _stop(process)
    finally:
        writer.close()
        serving.cancel()


async def _wait_ready(process: Process, options: ServerProcessOptions, output: LogTail) -> RunningServer:
    """Wait until the server listens; returns where."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(options.to_json().encode() + b"\n")
    if line := await process.stdout.readline():
        return msgspec.json.decode(line, type=RunningServer)
    status = await process.wait()
    if status == REFUSED:
        raise ConfigError(f"`server`: {_last_line(output)}")
    raise TrainingError(f"the server did not start ({_exit_reason(status)}): {_last_line(output)}")


async def _stop(process: Process) -> None:
    """Let the server finish the requests that it accepted; kill it if that takes too long."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _last_line(output: LogTail) -> str:
    line = output.last_line()
    return f"nothing was written to {output.path}" if line is None else f"{line} ({output.path})"


def _exit_reason(status: int) -> str:
    return f"status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
