"""Starts and ends child processes of this one.

The standard input of a child is a pipe from this process. When it closes, also because this process is gone, the child
must end. A guarded child need not see to that: its guardian reads the pipe instead (`leyden.process.guardian`), and
kills the child with all its descendants. The child may run on another machine (`leyden.process.place`).
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import IO

import msgspec

from leyden.process.descendants import descendants, is_zombie
from leyden.process.framing import to_frame
from leyden.process.guardian import END, KILL, KILL_TIMEOUT_S, Guard
from leyden.process.place import HERE, Place, ProxyOrder, RemotePlace, added_variables
from leyden.process.rotating_log import RotatingLog

_GUARDIAN_TIMEOUT_S = 5.0
"""How long a guardian may take to kill what it guards."""
_POLL_S = 0.005
_CHUNK_BYTES = 1 << 16


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of Leyden."""
    # without -P a file of the user may shadow one of ours
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def guarded(command: Sequence[str], guard: Guard, pass_fds: Sequence[int] = (), report: int = 2) -> list[str]:
    """Return the command that runs `command` under a guardian.

    Its standard input is the control pipe; that of the program is empty. It must inherit `pass_fds` and `report`.
    """
    return [*module_command("leyden.process.guardian", json.dumps([list(pass_fds), report, *guard])), *command]


class ChildProcess:
    """A process in its own session, so that Ctrl-C in a terminal reaches only this one."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
        log: RotatingLog | None = None,
        grace_s: float = 0.0,
        guard: Guard | None = None,
        report: int = 2,
        place: Place = HERE,
        listens: Sequence[Path] = (),
    ) -> None:
        """Start it; raises `OSError`. Output goes where that of this process goes, to `log`, or as Popen's values say.

        It has `grace_s` to end when its standard input closes; a guarded one has that of its guard. Its guardian writes
        to `report`, one of `pass_fds`, why it cannot be started or is killed.

        At another `place` it has the variables of its host, and those that `environment` adds to this process's;
        `pass_fds` are sockets, with whose numbers the command ends. It `listens` on Unix sockets there, at
        `place.path`, which can be reached at these paths here.
        """
        self._grace_s = grace_s if guard is None else guard.grace_s + _GUARDIAN_TIMEOUT_S
        self._guard = guard
        if guard is not None:
            command = guarded(command, guard, pass_fds, report)
        order = b""
        if isinstance(place, RemotePlace):
            words = list(command)[: len(command) - len(pass_fds)]
            pairs = [(str(one), place.path(one)) for one in listens]
            order = to_frame(msgspec.json.encode(ProxyOrder(place, words, added_variables(environment), pairs)))
            command, environment = module_command("leyden.process.proxy", *pass_fds), None
        with ExitStack() as opened:
            if log is not None:
                stderr = log.open()
                opened.callback(os.close, stderr)
                stdout = stderr if stdout is None else stdout
            self.process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                cwd=folder,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        # Only this object holds the pipe, and not the thread that waits for the end.
        self._stdin, self.process.stdin = self.process.stdin, None
        self.send(order)

    @property
    def pid(self) -> int:
        """Its process id, or that of its guardian."""
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, or the signal that ended it as a negative number; None while it runs."""
        return self.process.poll()

    async def wait(self) -> int:
        """Return the status when it has ended."""
        return await asyncio.wrap_future(self._ended)

    def send(self, message: bytes) -> None:
        """Write to its standard input. Does nothing if it has ended: its status says so."""
        with suppress(BrokenPipeError):
            while self._stdin is not None and message:
                message = message[self._stdin.write(message) :]

    async def first_line(self) -> bytes:
        """Return the line by which it says that it is ready; empty if it ends. Its standard output must be a pipe."""
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            return await asyncio.to_thread(pipe.readline)

    async def read_output(self, on_data: Callable[[bytes], object]) -> None:
        """Call `on_data` with what it writes to standard output, which must be a pipe, until the pipe closes."""
        assert self.process.stdout is not None
        await read_pipe(self.process.stdout, on_data)

    def hang_up(self) -> None:
        """Have it end within its grace time. One that was stopped continues: agents stop their guardians."""
        if self._guard is None:
            self._close_stdin()
        else:  # the pipe stays open for `kill`
            self.send(END)
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it at once; a guarded one with all its descendants."""
        if self._guard is None:
            self.process.kill()
        else:
            self.send(KILL)
            self.process.send_signal(signal.SIGCONT)

    async def end(self) -> int:
        """Have it end, and return its status. It is killed after the grace time, or when this is cancelled."""
        self.hang_up()
        ended = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait((ended,), timeout=self._grace_s)
            if self._guard is not None and not ended.done():
                await kill_descendants(self.pid, KILL_TIMEOUT_S)
                self.process.kill()
        finally:
            self.kill()
            self._close_stdin()
        return await ended

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.close()
            self._stdin = None

    @cached_property
    def _ended(self) -> "Future[int]":
        """Its status, from a thread: the shared pool has few threads, and children live long."""
        process, ended = self.process, Future[int]()
        ended.set_running_or_notify_cancel()  # so that no waiter can cancel it
        threading.Thread(target=lambda: ended.set_result(process.wait()), name="leyden-child", daemon=True).start()
        return ended


async def read_pipe(pipe: IO[bytes], on_data: Callable[[bytes], object]) -> None:
    """Call `on_data` with what is read from a pipe until it closes; then, or when cancelled, close it here."""
    async for data in pipe_chunks(pipe):
        on_data(data)


async def pipe_chunks(pipe: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield what is read from a pipe until it closes; then, or when cancelled, close it here."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while data := await reader.read(_CHUNK_BYTES):
            yield data
    finally:
        transport.close()


async def kill_descendants(pid: int, timeout_s: float) -> None:
    """Kill all descendants of a process that adopts orphans; it and they may be stopped."""
    deadline = time.monotonic() + timeout_s
    while (living := [each for each in descendants(pid) if not is_zombie(each)]) and time.monotonic() < deadline:
        for each in living:
            with suppress(OSError):
                os.kill(each, signal.SIGKILL)
        await asyncio.sleep(_POLL_S)
