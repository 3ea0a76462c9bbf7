"""Runs one attempt of a command as a process: task on stdin, result on stdout, with resource limits."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from leyden.api.wire import FinishRequest
from leyden.background import start_background
from leyden.client.agent_process import apply_limits
from leyden.client.attempt.outcome import end_of_attempt, result_from_json
from leyden.client.attempt.output_buffer import OutputBuffer
from leyden.client.attempt.result import MAX_ANSWER_BYTES, describe_too_large
from leyden.client.host_protocol import HostSetup
from leyden.client.isolation.launcher import Launch
from leyden.decoding import NotJson, decode_json, decode_text
from leyden.outcomes import Ending, Outcome
from leyden.process.child import kill_descendants, read_pipe
from leyden.process.guardian import KILL, TERMINATE, Guard, Program, exit_reason, fork_guardian, over_memory

_TERM_TIMEOUT_S, _KILL_TIMEOUT_S, _TREE_TIMEOUT_S, _LAST_OUTPUT_S = 2.0, 3.0, 1.0, 1.0
"""How long a process that is stopped may take to end; then its guardian; all below it; how long output may follow."""
_MAX_LINES, _MAX_MESSAGE = 20, 4000
_KEPT_END = 64
"""Bytes of each end of a line that is too long."""
_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "out of memory", "Out of memory", "Cannot allocate memory", "process OOM")


class CommandProcess:
    """The process of one attempt, under a guardian that kills all its descendants when it ends."""

    def __init__(self, setup: HostSetup) -> None:
        self.output = OutputBuffer()
        self._setup = setup
        self._memory_mb, self._cpu_s = setup.isolation.memory_mb, setup.rollout.cpu_s
        self.pid: int | None = None
        """The process id of the guardian; None before `start` and after the end."""
        self._control: int | None = None
        self._pipes: tuple[int, int, int, int] = (-1, -1, -1, -1)
        self._stopped = self._over_memory = False
        self._stopping: asyncio.Task[None] | None = None
        self._stderr_tail = b""
        self._result = LastJsonLine()

    def start(self, launch: Launch, folder: str) -> None:
        """Start the process. This process must have one thread."""
        pipes: list[tuple[int, int]] = []
        try:
            for _ in range(5):
                pipes.append(os.pipe())
            stdin, stdout, stderr, control, report = pipes
            program = Program(
                launch.command,
                launch.environment,
                Guard(user=launch.user, memory_mb=self._memory_mb),
                folder,
                (stdin[0], stdout[1], stderr[1]),
                prepare=partial(apply_limits, self._memory_mb, self._cpu_s),
            )
            self.pid = fork_guardian(program, control[0], report[1])
        except OSError:
            _close(*(end for pipe in pipes for end in pipe))
            raise
        _close(stdin[0], stdout[1], stderr[1], control[0], report[1])
        self._control, self._pipes = control[1], (stdin[1], stdout[0], stderr[0], report[0])
        if self._stopped:
            self.stop()

    async def run(self, attempt: str, task: bytes) -> FinishRequest:
        """Send the task and read the output until the process has ended and none of its descendants is left."""
        write_stdin, read_stdout, read_stderr, read_report = self._pipes
        report = bytearray()
        pipes = [
            start_background(_write(write_stdin, task + b"\n"), f"writing the task of {attempt}"),
            start_background(_read(read_stdout, self._on_stdout), f"reading stdout of {attempt}"),
            start_background(_read(read_stderr, self._on_stderr), f"reading stderr of {attempt}"),
        ]
        await _read(read_report, report.extend)  # it closes when the guardian ends
        status = self._wait()
        _, unfinished = await asyncio.wait(pipes, timeout=_LAST_OUTPUT_S)
        for pipe in unfinished:  # a descendant that escaped may hold the pipe open
            pipe.cancel()
        self._over_memory = self._memory_mb is not None and report == over_memory(self._memory_mb)
        if report and not self._over_memory:
            raise OSError(decode_text(bytes(report)).strip())
        return replace(self._read_end(status), output=self.output.text())

    def stop(self) -> None:
        """Terminate the process; kill it if it does not end in time."""
        self._stopped = True
        if self.pid is not None and self._stopping is None:
            self._stopping = start_background(self._end(self.pid), "the end of a command")

    async def _end(self, pid: int) -> None:
        self._tell(TERMINATE)
        await asyncio.sleep(_TERM_TIMEOUT_S)
        self._tell(KILL)
        await asyncio.sleep(_KILL_TIMEOUT_S)
        await kill_descendants(pid, _TREE_TIMEOUT_S)  # the command may stop its guardian again and again
        os.kill(pid, signal.SIGKILL)

    def _tell(self, message: bytes) -> None:
        """Send a message to the guardian, which the command may have stopped."""
        if self._control is not None and self.pid is not None:
            with suppress(BrokenPipeError):
                os.write(self._control, message)
            os.kill(self.pid, signal.SIGCONT)

    def _wait(self) -> int:
        """Reap the guardian, which has ended; return the exit status, or the signal as a negative number."""
        assert self.pid is not None and self._control is not None
        _, status = os.waitpid(self.pid, 0)
        os.close(self._control)
        self.pid = self._control = None
        if self._stopping is not None:
            self._stopping.cancel()
        return os.waitstatus_to_exitcode(status)

    def _on_stdout(self, data: bytes) -> None:
        self.output.add(data)
        self._result.add(data)

    def _on_stderr(self, data: bytes) -> None:
        self.output.add(data)
        self._stderr_tail = (self._stderr_tail + data)[-_MAX_MESSAGE:]

    def _read_end(self, status: int) -> FinishRequest:
        if status != 0:
            return FinishRequest(Outcome(Ending.AGENT_ERROR, self._describe_failure(status)))
        try:
            result = self._result.value()
        except AnswerTooLarge as error:
            return FinishRequest(Outcome(Ending.AGENT_ERROR, str(error)))
        return end_of_attempt(result_from_json(result), self._setup)

    def _describe_failure(self, status: int) -> str:
        stderr = decode_text(self._stderr_tail)
        message = exit_reason(status)
        if status in (-signal.SIGXCPU, 128 + signal.SIGXCPU):  # the latter from a sandbox
            message += f": it used more than {self._cpu_s:g} s of CPU time (`cpu_s`)"
        elif self._memory_mb is not None and self._over_memory:
            message += f": {over_memory(self._memory_mb).decode()}"
        elif self._memory_mb is not None and any(text in stderr for text in _OUT_OF_MEMORY):
            message += f": it needed more than {self._memory_mb} MB of memory (`memory_mb`)"
        return "\n".join([message, *stderr.rstrip().splitlines()[-_MAX_LINES:]])[:_MAX_MESSAGE]


class AnswerTooLarge(Exception):
    """The last line of JSON is longer than `MAX_ANSWER_BYTES`."""

    def __init__(self, size: int) -> None:
        super().__init__(describe_too_large(size, MAX_ANSWER_BYTES))


class LastJsonLine:
    """Keeps the last line that is JSON, without keeping the others.

    Of a line that is too long only the ends are kept. It is taken for JSON if they are those of an object, an array or
    a text: an earlier line must not be taken for the result.
    """

    def __init__(self) -> None:
        self._last: bytes | AnswerTooLarge | None = None
        self._line = bytearray()
        self._dropped = 0
        """Bytes that were cut out of the line."""

    def add(self, data: bytes) -> None:
        """Add output as it arrives, in chunks of any size."""
        end, *others = data.split(b"\n")
        self._extend(end)
        if others:
            *lines, rest = others
            self._last = next(filter(_is_json, reversed(lines)), None) or self._ended_line()
            self._line, self._dropped = bytearray(), 0
            self._extend(rest)

    def value(self) -> Any:
        """Return the decoded line, which may lack its newline at the end of the output; None if there is none."""
        last = self._ended_line()
        if isinstance(last, AnswerTooLarge):
            raise last
        return None if last is None else _decode(last)

    def _extend(self, part: bytes) -> None:
        self._line += part
        if len(self._line) > MAX_ANSWER_BYTES:
            before, self._line = len(self._line), self._line.strip()  # white space around it is no part of the JSON
            del self._line[_KEPT_END:-_KEPT_END]
            self._dropped += before - len(self._line)

    def _ended_line(self) -> bytes | AnswerTooLarge | None:
        """Return the current line, if it is JSON, or the last one that was."""
        if not self._dropped:
            return bytes(self._line) if _is_json(self._line) else self._last
        ends = bytes(self._line.strip())
        is_json = ends[:1] + ends[-1:] in (b"{}", b"[]", b'""')
        return AnswerTooLarge(self._dropped + len(self._line)) if is_json else self._last


def _is_json(line: bytes | bytearray) -> bool:
    if not line.strip()[:1] or line.strip()[:1] not in b'{["-0123456789tfn':
        return False
    try:
        _decode(line)
    except NotJson:
        return False
    return True


def _decode(line: bytes | bytearray) -> Any:
    """Decode a line of JSON, also an object with `NaN` or `Infinity`, which Python writes and JSON does not have."""
    try:
        return decode_json(line)
    except NotJson:
        if line.strip()[:1] not in (b"{", b"[") or (b"NaN" not in line and b"Infinity" not in line):
            raise
    try:
        return json.loads(decode_text(line))
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


async def _write(pipe: int, task: bytes) -> None:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(pipe, "wb", 0))
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    with suppress(OSError, RuntimeError):  # the command does not read its task (uvloop: RuntimeError)
        writer.write(task)
        await writer.drain()
    writer.close()


async def _read(pipe: int, on_data: Callable[[bytes], object]) -> None:
    await read_pipe(os.fdopen(pipe, "rb", 0), on_data)
