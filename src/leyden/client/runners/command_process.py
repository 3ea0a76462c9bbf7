"""Runs one attempt of a command as a process: task on stdin, result on stdout, with resource limits."""

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from leyden.background import start_background
from leyden.client.attempt.outcome import end_of_attempt, result_from_json
from leyden.client.attempt.output_buffer import OutputBuffer
from leyden.client.attempt.result import MAX_RESULT_BYTES
from leyden.client.host_protocol import AttemptEnd
from leyden.client.processes.descendants import die_with_parent
from leyden.decoding import NotJson, decode_json, decode_text
from leyden.outcomes import Ending, Outcome

_TERM_TIMEOUT_S, _LAST_OUTPUT_S = 2.0, 1.0
_CHUNK_BYTES = 1 << 16
_MAX_LINES, _MAX_MESSAGE = 20, 4000
_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "out of memory", "Out of memory", "Cannot allocate memory", "process OOM")


class ResourceLimits(Struct, frozen=True):
    """Limits of each process of a command; None: no limit."""

    memory_mb: int | None = None
    cpu_s: float | None = None

    def apply(self) -> None:
        """Apply the limits to this process, which was just forked, and its descendants."""
        die_with_parent()
        if self.memory_mb is not None:  # not RLIMIT_AS: address space that is only reserved costs nothing
            resource.setrlimit(resource.RLIMIT_DATA, (self.memory_mb << 20, self.memory_mb << 20))
        if self.cpu_s is not None:
            seconds = max(1, round(self.cpu_s))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


class CommandProcess:
    """The process of one attempt, with its process group."""

    def __init__(self, limits: ResourceLimits) -> None:
        self.output = OutputBuffer()
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = False
        self._stderr_tail = b""
        self._result = LastJsonLine()

    async def start(self, command: list[str], folder: str, environment: dict[str, str]) -> None:
        """Start the process."""
        self._process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=self._limits.apply,  # safe: this process has one thread
        )
        if self._stopped:
            self.stop()

    @property
    def pid(self) -> int | None:
        """The process id; None before `start`."""
        return self._process.pid if self._process is not None else None

    async def run(
        self, attempt: str, task: bytes, has_reward_function: bool, kill_rest: Callable[[], Awaitable[None]]
    ) -> AttemptEnd:
        """Send the task, read the output until the process ends, and kill its group; `kill_rest` kills what left it."""
        process = self._process
        assert process is not None and process.stdin is not None
        pipes = [
            start_background(_write(process.stdin, task + b"\n"), f"writing the task of {attempt}"),
            start_background(_read_pipe(process.stdout, self._on_stdout), f"reading stdout of {attempt}"),
            start_background(_read_pipe(process.stderr, self._on_stderr), f"reading stderr of {attempt}"),
        ]
        status = await process.wait()
        self._signal(signal.SIGKILL)
        await kill_rest()
        _, unfinished = await asyncio.wait(pipes, timeout=_LAST_OUTPUT_S)
        for pipe in unfinished:  # a descendant that escaped may hold the pipe open
            pipe.cancel()
        end = self._read_end(attempt, status, has_reward_function)
        return msgspec.structs.replace(end, output=self.output.text())

    def stop(self) -> None:
        """Terminate the group; kill it if it does not end in time."""
        self._stopped = True
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(_TERM_TIMEOUT_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _on_stdout(self, data: bytes) -> None:
        self.output.add(data)
        self._result.add(data)

    def _on_stderr(self, data: bytes) -> None:
        self.output.add(data)
        self._stderr_tail = (self._stderr_tail + data)[-_MAX_MESSAGE:]

    def _read_end(self, attempt: str, status: int, has_reward_function: bool) -> AttemptEnd:
        if status != 0:
            return AttemptEnd(attempt, Outcome(Ending.AGENT_ERROR, self._describe_failure(status)))
        return end_of_attempt(attempt, result_from_json(self._result.value()), has_reward_function)

    def _describe_failure(self, status: int) -> str:
        stderr = decode_text(self._stderr_tail)
        message = f"exit status {status}" if status > 0 else f"killed by {signal.Signals(-status).name}"
        if -status == signal.SIGXCPU:
            message += f": it used more than {self._limits.cpu_s:g} s of CPU time (`cpu_s`)"
        elif self._limits.memory_mb is not None and any(text in stderr for text in _OUT_OF_MEMORY):
            message += f": it needed more than {self._limits.memory_mb} MB of memory (`memory_mb`)"
        return "\n".join([message, *stderr.rstrip().splitlines()[-_MAX_LINES:]])[:_MAX_MESSAGE]


class LastJsonLine:
    """Keeps the last line that is JSON, without keeping the others."""

    def __init__(self) -> None:
        self._last: bytes | None = None
        self._line = bytearray()
        self._too_long = False

    def add(self, data: bytes) -> None:
        """Add output as it arrives, in chunks of any size."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"" if self._too_long else bytes(self._line) + lines[0]
            self._line, self._too_long = bytearray(), False
            self._last = next(filter(_is_json, reversed(lines)), self._last)
        self._line += rest
        if len(self._line) > MAX_RESULT_BYTES:
            self._line, self._too_long = bytearray(), True

    def value(self) -> Any:
        """Return the decoded line, which may lack its newline at the end of the output; None where there is none."""
        last = bytes(self._line) if _is_json(self._line) else self._last
        return None if last is None else decode_json(last)


def _is_json(line: bytes | bytearray) -> bool:
    if not line.strip()[:1] or line.strip()[:1] not in b'{["-0123456789tfn':
        return False
    try:
        decode_json(line)
    except NotJson:
        return False
    return True


async def _write(pipe: asyncio.StreamWriter, task: bytes) -> None:
    with suppress(OSError, RuntimeError):  # the command does not read its task (uvloop: RuntimeError)
        pipe.write(task)
        await pipe.drain()
    pipe.close()


async def _read_pipe(pipe: asyncio.StreamReader | None, on_data: Callable[[bytes], None]) -> None:
    assert pipe is not None
    while data := await pipe.read(_CHUNK_BYTES):
        on_data(data)
