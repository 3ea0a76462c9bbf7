"""Runs the server of a local run in its own process, so that it does not compete with the engine for Python's lock.

The server reaches the engine of each policy over a socket to this process, and ends with this process, however that
ends. A server that dies is started again at the same address, within limits; one that does not answer is killed first.
Attempts that were active when it died are released without being charged, because their model calls may have failed
with it. A server whose store was deleted is not started again: it would begin with an empty one.
"""

import asyncio
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from subprocess import PIPE
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from leyden.background import start_background
from leyden.backoff import Backoff
from leyden.config import ConfigError
from leyden.engine.protocol import ServedEngine
from leyden.learner.errors import TrainingError
from leyden.local.notes import print_note
from leyden.process.child import ChildProcess, module_command
from leyden.process.guardian import exit_reason
from leyden.process.rotating_log import RotatingLog
from leyden.process.supervised import SupervisedProcess
from leyden.server.options import REFUSED, SHOW_STACK, STORE_LOST, RunningServer, ServerProcessOptions

_STOP_TIMEOUT_S = 40.0
"""A server gives the requests that it accepted half a minute."""
_MAX_DEATHS, _DEATHS_WITHIN_S = 5, 60.0
"""A server that dies this often within this time is not started again."""
_MAX_STARTS = 3
"""How often a server that dies before it listens is started when the run starts."""
_REFUSED_WITHIN_S = 600.0
"""How long a server that refuses to start is started again."""
_STACK_S = 1.0
"""How long a server that does not answer has to write to its log what it was doing."""
_BACKOFF = Backoff(first_s=0.1, max_s=5.0)
_INTERVAL_S, _TIMEOUT_S = 5.0, 10.0
"""Between two questions whether a server answers, and how long an answer may take."""
_MAX_SILENT_S = 60.0
"""How long a server that could answer may not answer."""
_NOT_ITS_FAULT = "TtD"
"""States of a process (proc(5)): stopped, traced, waiting for the disk."""


class StoreGone(TrainingError):
    """The server's store was deleted, moved or replaced."""


class LocalServer(SupervisedProcess):
    """A server process whose model calls go to engines of this process, one for each policy."""

    def __init__(self, options: ServerProcessOptions, engines: Mapping[str, ServedEngine], log_file: Path) -> None:
        super().__init__("the server", _MAX_DEATHS, _DEATHS_WITHIN_S, TrainingError)
        self._options, self._engines, self._output = options, engines, RotatingLog(log_file)
        self._starts_held: set[str] = set()
        self._process: ChildProcess
        self._engine_connections: list[tuple[asyncio.StreamWriter, asyncio.Task[None]]] = []
        self.running: RunningServer

    async def start(self) -> None:
        """Start the server and wait until it listens."""
        self.running = await self._first_launch()
        port = urlsplit(self.running.url).port
        assert port is not None
        serve = replace(self._options.serve, server=replace(self._options.serve.server, port=port), create=False)
        self._options = replace(self._options, serve=serve, release=True, park=None)
        self._start_supervising()

    @contextmanager
    def starting_held(self, policy: str) -> Iterator[None]:
        """Within this context, a server that is started again starts no call of a policy until it publishes a version.

        The weights change meanwhile: it could not tell which version samples a token.
        """
        self._starts_held.add(policy)
        try:
            yield
        finally:
            self._starts_held.discard(policy)

    async def _first_launch(self) -> RunningServer:
        """Start the server; one that dies before it listens is started again."""
        for _ in range(_MAX_STARTS - 1):
            try:
                return await self._launch(self._options)
            except TrainingError as error:
                print_note(f"{error}; it is started again")
        return await self._launch(self._options)

    async def _restart(self, reason: str) -> str | None:
        """Start the server again. While it refuses to start, because the disk is full, say, try for some minutes."""
        print_note(f"{reason}; it is started again")
        failures, deadline = 0, time.monotonic() + _REFUSED_WITHIN_S
        while True:
            await _BACKOFF.wait(failures + 1)
            try:
                self.running = await self._launch(self._options)
                return None
            except ConfigError as refusal:
                if time.monotonic() > deadline:
                    raise
                failures += 1
                if failures == 1:
                    print_note(f"{refusal}; trying again")
            except StoreGone:
                raise
            except TrainingError as error:
                return str(error)

    async def _wait_ended(self) -> str:
        """Wait until the process ends, or kill it when it does not answer any more; returns how it ended.

        Raises `StoreGone` if starting it again is wrong.
        """
        ended = asyncio.create_task(self._process.wait())
        silent = asyncio.create_task(wait_unresponsive(self.running.url, self._process.pid))
        try:
            await asyncio.wait({ended, silent}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                reason = f"the server ended ({exit_reason(ended.result())})"
            else:
                reason = f"the server did not answer for {_MAX_SILENT_S:g} s, and was killed"
                self._process.process.send_signal(SHOW_STACK)
                await asyncio.wait({ended}, timeout=_STACK_S)
                self._process.kill()
            status = await ended
        finally:
            ended.cancel()
            silent.cancel()
        self._close_engines()
        if status == STORE_LOST:
            raise StoreGone(self._output.last_line() or "the server's store was lost")
        return f"{reason}: {_last_line(self._output)}"

    async def _launch(self, options: ServerProcessOptions) -> RunningServer:
        """Start a process that is connected to the engines, and wait until it listens."""
        served = []
        with ExitStack() as opened:
            numbers = []
            for policy in options.policies:
                engine = self._engines[policy.policy]
                ours, theirs = socket.socketpair()
                numbers.append(opened.enter_context(theirs).fileno())
                reader, writer = await asyncio.open_connection(sock=ours)
                serving = start_background(engine.serve(reader, writer), "serving an engine to the server process")
                self._engine_connections.append((writer, serving))
                served.append(replace(policy, engine=engine.address, held=policy.policy in self._starts_held))
            self._process = ChildProcess(
                module_command("leyden.server", *numbers),
                pass_fds=numbers,
                stdout=PIPE,
                log=self._output,
                grace_s=_STOP_TIMEOUT_S,
            )
        try:
            options = replace(options, policies=tuple(served))
            return await _wait_ready(self._process, options, self._output)
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> None:
        """Let the server finish the requests that it accepted; kill it if that takes too long."""
        await self._process.end()
        self._close_engines()
        await asyncio.to_thread(self._output.tail)  # until it is all in the log

    def _close_engines(self) -> None:
        for writer, serving in self._engine_connections:
            writer.close()
            serving.cancel()
        self._engine_connections.clear()


async def _wait_ready(process: ChildProcess, options: ServerProcessOptions, output: RotatingLog) -> RunningServer:
    """Wait until the server listens; returns where."""
    process.send(options.to_json().encode() + b"\n")
    if line := await process.first_line():
        return msgspec.json.decode(line, type=RunningServer)
    status = await process.wait()
    if status == STORE_LOST:
        raise StoreGone(output.last_line() or "the server's store was lost")
    if status == REFUSED:
        raise ConfigError(f"`server`: {_last_line(output)}")
    raise TrainingError(f"the server did not start ({exit_reason(status)}): {_last_line(output)}")


def _last_line(output: RotatingLog) -> str:
    line = output.last_line()
    return f"nothing was written to {output.path}" if line is None else f"{line} ({output.path})"


async def wait_unresponsive(url: str, pid: int) -> None:
    """Return when a server has not answered for a minute in which it could have.

    While it is stopped (by a debugger, say), waits for the disk, or is ready to run and the machine gives it no CPU, it
    is not to blame, and starting it again would not help.
    """
    silent_s, before, waited_s = 0.0, time.monotonic(), _waited_s(pid)
    while silent_s < _MAX_SILENT_S:
        await asyncio.sleep(_INTERVAL_S)
        # In a thread: the answer counts even if this process was too busy to see it come.
        answers = await asyncio.to_thread(_answers, url)
        # This process may have been stopped too, so no check counts for more than it takes.
        passed_s = min(time.monotonic() - before, _INTERVAL_S + _TIMEOUT_S)
        starved_s = _waited_s(pid) - waited_s
        before, waited_s = time.monotonic(), waited_s + starved_s
        if answers:
            silent_s = 0.0
        elif _state(pid) not in _NOT_ITS_FAULT:
            silent_s += max(0.0, passed_s - starved_s)


def _answers(url: str) -> bool:
    address = urlsplit(url)
    with closing(HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", "/healthz")
            connection.getresponse()
        except (TimeoutError, ConnectionRefusedError):
            return False
        except (OSError, HTTPException):  # a server that closes a connection, since it has too many, runs
            pass
    return True


def _waited_s(pid: int) -> float:
    """Return how long the main thread of a process was ready to run and had no CPU; 0 if that is not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, LookupError, ValueError):
        return 0.0


def _state(pid: int) -> str:
    """Return the letter of a process's state; R if it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "R"
