"""The host process for commands: `python -m leyden.client.runners.command_host SOCKET_FD CRASH_FD`.

It starts one process for each attempt, with the attempt's own key and under a guardian, which kills all descendants of
the process when it ends, or when this process does.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from typing import NoReturn

import msgspec
import uvloop

from leyden.api.wire import FinishRequest, Lease
from leyden.background import start_background
from leyden.client.agent_process import KEY_VARIABLE, agent_environment, report_crashes_to
from leyden.client.host_protocol import (
    BlockerFound,
    CodeReturned,
    FindBlocker,
    HostFailed,
    HostReady,
    HostSetup,
    MessageStream,
    Ping,
    Pong,
    StopAttempt,
    StopReply,
    ToHost,
)
from leyden.client.isolation.launcher import Launch, launch
from leyden.client.isolation.options import SandboxUnavailable
from leyden.client.runners.command_process import CommandProcess
from leyden.client.seeds import HASH_SEED, seed_of
from leyden.client.services.registry import addressed_services
from leyden.outcomes import Ending, Outcome
from leyden.process.descendants import adopt_orphans, kill_children
from leyden.user_code.loading import LoadError, read_command

_log = logging.getLogger("leyden.host")
ATTEMPT_VARIABLE = "LEYDEN_ATTEMPT"
_MAX_VARIABLE = 128 * 1024 - 64
"""Linux refuses a longer environment string; a longer task is passed on stdin only."""
_KILL_TIMEOUT_S = 1.0


class CommandHost:
    """Runs the attempts that its worker starts."""

    def __init__(self, setup: HostSetup, stream: "MessageStream[ToHost]", command: list[str]) -> None:
        self._setup, self._stream, self._command = setup, stream, command
        self._processes: dict[str, CommandProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._removers: list[subprocess.Popen[bytes]] = []
        """Child processes that remove the scratch folders of ended attempts."""

    async def serve(self) -> None:
        """Handle messages until the worker is gone."""
        self._stream.send(HostReady(addressed_services(self._setup.services)))
        while (message := await self._stream.receive()) is not None:
            match message:
                case Lease():
                    task = start_background(self._run(message), f"attempt {message.id}")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case StopAttempt(attempt):
                    self._stop(attempt)
                case Ping(number):
                    self._stream.send(Pong(number))
                case FindBlocker():
                    self._stream.send(BlockerFound(None))
        if not self._processes:  # nothing else waits for the end of this process
            for remover in self._removers:
                remover.wait()

    async def _run(self, lease: Lease) -> None:
        attempt, task = lease.id, msgspec.json.encode(lease.task.input)
        process = CommandProcess(self._setup)
        self._processes[attempt] = process
        started: Launch | None = None
        try:
            started = launch(self._setup.isolation, self._command, self._setup.base, self._environment(lease, task))
            process.start(started, self._setup.base)
            end = await process.run(attempt, task)
        except (OSError, SandboxUnavailable) as error:
            end = FinishRequest(Outcome(Ending.LOST, f"the command cannot be started here: {error}"))
        except Exception as error:  # a bug here must not leave the attempt without an end
            _log.exception("attempt %s failed in its host process", attempt)
            end = FinishRequest(Outcome(Ending.LOST, f"the host failed: {type(error).__name__}: {error}"))
        del self._processes[attempt]
        self._removers = [remover for remover in self._removers if remover.poll() is None]
        keep = [process.pid for process in self._processes.values() if process.pid is not None]
        keep += [remover.pid for remover in self._removers]
        kill_children(_KILL_TIMEOUT_S, keep=keep)  # there are others only if a command has killed its guardian
        self._stream.send(CodeReturned(attempt, end))
        if started is not None and (remover := started.release_in_child()) is not None:
            self._removers.append(remover)

    def _stop(self, attempt: str) -> None:
        process = self._processes.get(attempt)
        self._stream.send(StopReply(attempt, process.output.text() if process is not None else ""))
        if process is not None:
            process.stop()

    def _environment(self, lease: Lease, task: bytes) -> dict[str, str]:
        server, key = self._setup.server, lease.key
        variables = {
            **agent_environment(self._setup.isolation, server, key),
            "LEYDEN_URL": server,
            KEY_VARIABLE: key,
            "LEYDEN_RUN": lease.run,
            ATTEMPT_VARIABLE: lease.id,
            "TRACEPARENT": lease.traceparent,
            "OTEL_EXPORTER_OTLP_ENDPOINT": server,
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{key}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        variables |= {f"LEYDEN_SERVICE_{name.upper()}": address for name, address in lease.services.items()}
        if self._setup.rollout.fixed_seeds:
            variables |= {**HASH_SEED, "LEYDEN_SEED": str(seed_of(lease.task.input))}
        if len(task) <= _MAX_VARIABLE:
            variables["LEYDEN_TASK"] = task.decode()
        return variables


async def _serve(end: socket.socket) -> None:
    stream: MessageStream[ToHost] = await MessageStream.connect(end, ToHost)
    setup = await stream.receive()
    if not isinstance(setup, HostSetup):
        return
    try:
        command = read_command(setup.agent, setup.base)
    except LoadError as error:
        stream.send(HostFailed(str(error)))
        await stream.receive()
        return
    await CommandHost(setup, stream, command).serve()


def main(fd: int, crash_fd: int) -> NoReturn:
    """Run commands until the worker is gone. The guardians then kill all that is left of them."""
    os.set_inheritable(fd, False)
    report_crashes_to(crash_fd)
    adopt_orphans()
    uvloop.run(_serve(socket.socket(fileno=fd)))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
