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
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from leyden.client.attempt.output_buffer import OutputBuffer
from leyden.client.host_protocol import (
    AttemptEnd,
    BlockerFound,
    FindBlocker,
    HostFailed,
    HostReady,
    HostSetup,
    HostStopping,
    MessageStream,
    Ping,
    Pong,
    StartAttempt,
    StepReward,
    StopAttempt,
    ToWorker,
)
from leyden.client.processes.crash_report import CrashReport
from leyden.client.processes.descendants import end_marked
from leyden.client.processes.environment import environment
from leyden.client.processes.orphan_reaper import VARIABLE
from leyden.loading import LoadError
from leyden.wire import Lease

_END_S, _LAST_WORDS_S, _ANSWER_S = 5.0, 0.2, 2.0
_PAUSE_S, _TRIES = 0.1, 3
_CHUNK = 1 << 16


class HostDied(Exception):
    """A host died while it loaded the agent; the message says how."""


class HostProcess:
    """One host, from `start` to `close`; it may die in between."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stream: MessageStream[ToWorker],
        mark: str,
        crash: CrashReport,
        kept: int | None,
    ) -> None:
        self._process, self._stream, self._mark, self._crash = process, stream, mark, crash
        self.pid = process.pid
        self.pool: str | None = None
        self.services: tuple[str, ...] = ()
        self.at_once: int | None = None
        self.return_s = 0.5
        self._exit = asyncio.ensure_future(asyncio.to_thread(process.wait))
        self._output = OutputBuffer()
        self._keeping = None if kept is None else asyncio.ensure_future(_keep(kept, self._output))
        self._awaited: dict[Any, asyncio.Future[Any]] = {}
        self._pings = 0

    @classmethod
    async def start(
        cls,
        module: str,
        setup: HostSetup,
        *,
        pool: str | None = None,
        return_s: float = 0.5,
        keep_output: bool = False,
    ) -> Self:
        """Start one. A death while it loads the agent may be bad luck; several are the agent's doing: `LoadError`.

        With `keep_output` what it prints is kept rather than passed on.
        """
        for _ in range(_TRIES):
            try:
                host = await cls._try(module, setup, keep_output)
            except HostDied as died:
                how = died
                await asyncio.sleep(_PAUSE_S)
            else:
                host.pool, host.return_s = pool, return_s
                return host
        raise LoadError(f"{setup.agent!r} cannot be loaded: its process dies of it ({how})")

    @classmethod
    async def _try(cls, module: str, setup: HostSetup, keep_output: bool) -> Self:
        """Start one and wait until it has loaded the agent; raises `LoadError` or `HostDied` where it has not."""
        ours, theirs = socket.socketpair()
        mark = f"{setup.mark}-{secrets.token_hex(8)}"
        crash = CrashReport()
        kept, printing = os.pipe() if keep_output else (None, None)
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [sys.executable, "-m", module, str(theirs.fileno()), str(crash.fileno())],
                pass_fds=[theirs.fileno(), crash.fileno()],
                env={**environment(setup.server, setup.key), VARIABLE: mark},
                stdin=subprocess.DEVNULL,
                stdout=printing,
                stderr=printing,
                start_new_session=True,  # its group is what it started, and a terminal's Ctrl-C is the worker's matter
            )
        finally:
            theirs.close()
            if printing is not None:
                os.close(printing)
        host = cls(process, await MessageStream.over(ours, ToWorker), mark, crash, kept)
        try:
            host._stream.send(setup)
            match await host._stream.receive():
                case HostReady(services, at_once):
                    host.services, host.at_once = services, at_once
                    return host
                case HostFailed(message):
                    raise LoadError(message)
                case _:
                    raise HostDied(await host.death())
        except BaseException:
            await asyncio.shield(host.close())
            raise

    def run(self, lease: Lease, lent: Mapping[str, str]) -> None:
        """Have an attempt run."""
        attempt, key = lease.attempt, "" if self.pool is not None else lease.key
        about = (attempt.id, attempt.rollout, lease.traceparent, lease.task.input)
        self._stream.send(StartAttempt(*about, run=attempt.run, key=key, services=dict(lent)))

    async def stop(self, attempt: str) -> HostStopping | None:
        """Have an attempt stopped; what it has printed, unless code in the host lets no other thread run."""
        said = await self._ask(StopAttempt(attempt), attempt, _ANSWER_S)
        return said if isinstance(said, HostStopping) else None

    async def answers(self, within_s: float) -> bool:
        """Whether its event loop runs."""
        self._pings += 1
        return await self._ask(Ping(self._pings), self._pings, within_s) is not None

    async def blocker(self) -> str | None:
        """The attempt whose code keeps its event loop from running."""
        said = await self._ask(FindBlocker(), BlockerFound, _ANSWER_S)
        return said.by if isinstance(said, BlockerFound) else None

    async def _ask(self, question: Any, about: Any, within_s: float) -> HostStopping | Pong | BlockerFound | None:
        """Ask something to which an answer about the same follows; None where it does not in time."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited[about] = answer
        self._stream.send(question)
        try:
            return await asyncio.wait_for(answer, within_s)
        except TimeoutError:
            return None
        finally:
            self._awaited.pop(about, None)

    async def listen(self, hear: Callable[[AttemptEnd | StepReward], None]) -> None:
        """Hear of every reward, and of every attempt whose code has returned, until the host has died."""
        reading = asyncio.ensure_future(self._read(hear))
        try:
            await asyncio.wait((reading, self._exit), return_when=asyncio.FIRST_COMPLETED)
            # what it said before it died is still to be read, but a process that an agent forked may hold the socket
            await asyncio.wait((reading,), timeout=_LAST_WORDS_S)
        finally:
            reading.cancel()

    async def _read(self, hear: Callable[[AttemptEnd | StepReward], None]) -> None:
        while (message := await self._stream.receive()) is not None:
            match message:
                case AttemptEnd() | StepReward():
                    hear(message)
                case HostStopping():
                    self._answer(message.attempt, message)
                case Pong():
                    self._answer(message.number, message)
                case BlockerFound():
                    self._answer(BlockerFound, message)

    def _answer(self, about: Any, message: Any) -> None:
        waiting = self._awaited.get(about)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def death(self) -> str:
        """How the process ended, in words, with what was running in it where Python could say."""
        code = await asyncio.shield(self._exit)
        how = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return "\n".join(filter(None, (how, self._crash.read())))

    def output(self) -> str:
        """What it printed, where that is kept."""
        return self._output.text()

    async def close(self, *, at_once: bool = False) -> None:
        """End the host and all that it started; where there is time, it may tear down first."""
        self._stream.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exit), 0 if at_once else _END_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.shield(self._exit)
        await end_marked(f"{VARIABLE}={self._mark}\0".encode())
        if self._keeping is not None:
            await asyncio.wait((self._keeping,), timeout=_LAST_WORDS_S)
            self._keeping.cancel()


async def _keep(pipe: int, output: OutputBuffer) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
    )
    try:
        while data := await reader.read(_CHUNK):
            output.add(data)
    finally:
        transport.close()
