"""The process that runs commands: `python -m leyden.client.runners.command_host FD FILE`; FD is a socket to the worker.

Every attempt is a process of its own, with the attempt's own key, in a session and group of its own, which ends whole.
When the worker is gone, however it went, so are this process and all the groups; the kernel ends the commands where
this process is killed itself.
"""

import asyncio
import os
import socket
import sys
from functools import partial
from typing import NoReturn

import msgspec
import uvloop

from leyden.client.agent_reference import read_command
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
    StopAttempt,
    ToHost,
)
from leyden.client.processes import crash_report
from leyden.client.processes.descendants import adopt_orphans, bury, die_first, end_all, end_marked
from leyden.client.processes.environment import KEY_VARIABLE, environment
from leyden.client.runners.command_process import CommandProcess, ResourceLimits
from leyden.client.services.registry import lent_by_address
from leyden.loading import LoadError
from leyden.outcomes import Ending, Outcome

ATTEMPT_VARIABLE = "LEYDEN_ATTEMPT"
_LONGEST_VARIABLE = 128 * 1024 - 64
"""Linux refuses a longer string in an environment; a longer task is on stdin only."""


class CommandHost:
    """Runs the attempts that its worker names."""

    def __init__(self, setup: HostSetup, stream: "MessageStream[ToHost]", words: list[str]) -> None:
        self._setup, self._stream, self._words = setup, stream, words
        self._limits = ResourceLimits(setup.memory_mb, setup.cpu_s)
        self._processes: dict[str, CommandProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()

    async def serve(self) -> None:
        """Work until the worker is gone."""
        self._stream.send(HostReady(lent_by_address(self._setup.services)))
        while (message := await self._stream.receive()) is not None:
            match message:
                case StartAttempt():
                    task = asyncio.create_task(self._run(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case StopAttempt(attempt):
                    self._stop(attempt)
                case Ping(number):
                    self._stream.send(Pong(number))
                case FindBlocker():
                    self._stream.send(BlockerFound(None))

    async def _run(self, start: StartAttempt) -> None:
        task = msgspec.json.encode(start.task)
        process = CommandProcess(self._limits)
        self._processes[start.attempt] = process
        try:
            async with self._starting:
                await process.start(self._words, self._setup.base, self._environment(start, task))
            mark = f"{ATTEMPT_VARIABLE}={start.attempt}\0".encode()
            ended = await process.finish(
                start.attempt, task, self._setup.scored, partial(end_marked, mark, self._known)
            )
        except OSError as error:
            ended = AttemptEnd(start.attempt, Outcome(Ending.LOST, f"the command cannot be started here: {error}"))
        del self._processes[start.attempt]
        if not self._starting.locked():  # what is just being started is not known yet
            bury(self._known())
        self._stream.send(ended)

    def _known(self) -> set[int]:
        return {process.pid for process in self._processes.values() if process.pid is not None}

    def _stop(self, attempt: str) -> None:
        process = self._processes.get(attempt)
        self._stream.send(HostStopping(attempt, process.output.text() if process is not None else ""))
        if process is not None:
            process.stop()

    def _environment(self, start: StartAttempt, task: bytes) -> dict[str, str]:
        server, key = self._setup.server, start.key
        variables = {
            **environment(server, key),
            "LEYDEN_URL": server,
            KEY_VARIABLE: key,
            "LEYDEN_RUN": start.run,
            ATTEMPT_VARIABLE: start.attempt,
            "TRACEPARENT": start.traceparent,
            "OTEL_EXPORTER_OTLP_ENDPOINT": server,
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{key}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        variables |= {f"LEYDEN_SERVICE_{name.upper()}": address for name, address in start.services.items()}
        if len(task) <= _LONGEST_VARIABLE:
            variables["LEYDEN_TASK"] = task.decode()
        return variables


async def _serve(end: socket.socket) -> None:
    stream: MessageStream[ToHost] = await MessageStream.over(end, HostSetup | ToHost)
    setup = await stream.receive()
    if not isinstance(setup, HostSetup):
        return
    try:
        words = read_command(setup.agent, setup.base)
    except LoadError as error:
        stream.send(HostFailed(str(error)))
        await stream.receive()
        return
    await CommandHost(setup, stream, words).serve()


def main(fd: int, crash_fd: int) -> NoReturn:
    """Run commands for as long as the worker is there, and leave none of their processes behind."""
    os.set_inheritable(fd, False)
    crash_report.watch(crash_fd)
    die_first()
    adopt_orphans()
    uvloop.run(_serve(socket.socket(fileno=fd)))
    end_all()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
