"""One command as a process: fed its task, listened to, held to its limits, and ended with all that it started."""

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from leyden.client.attempt.outcome import ended_with, from_json
from leyden.client.attempt.output_buffer import OutputBuffer
from leyden.client.attempt.result import LONGEST_RESULT
from leyden.client.host_protocol import AttemptEnd
from leyden.client.processes.descendants import die_with_parent
from leyden.outcomes import Ending, Outcome

_GRACE_S, _LAST_WORDS_S = 2.0, 1.0
_CHUNK = 1 << 16
_LINES, _LONGEST = 20, 4000
_NO_MEMORY = ("MemoryError", "bad_alloc", "out of memory", "Out of memory", "Cannot allocate memory", "process OOM")


class ResourceLimits(Struct, frozen=True):
    """What each process of a command may use; None: as much as there is."""

    memory_mb: int | None = None
    cpu_s: float | None = None

    def impose(self) -> None:
        """Hold this process, just forked, and its descendants to the limits."""
        die_with_parent()
        if self.memory_mb is not None:  # what it may write to: address space that is only reserved costs nothing
            resource.setrlimit(resource.RLIMIT_DATA, (self.memory_mb << 20, self.memory_mb << 20))
        if self.cpu_s is not None:
            seconds = max(1, round(self.cpu_s))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


class CommandProcess:
    """One attempt's process, and its group."""

    def __init__(self, limits: ResourceLimits) -> None:
        self.output = OutputBuffer()
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = False
        self._errors = b""
        self._results = LastDocument()

    async def start(self, words: list[str], folder: str, variables: dict[str, str]) -> None:
        """Start it."""
        self._process = await asyncio.create_subprocess_exec(
            *words,
            cwd=folder,
            env=variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=self._limits.impose,  # safe: this process has one thread
        )
        if self._stopped:
            self.stop()

    @property
    def pid(self) -> int | None:
        """None: not started yet."""
        return self._process.pid if self._process is not None else None

    async def finish(self, attempt: str, task: bytes, scored: bool, clear: Callable[[], Awaitable[None]]) -> AttemptEnd:
        """Give it its task and hear it to its end; then its group ends, and `clear` ends what left the group."""
        process = self._process
        assert process is not None and process.stdin is not None
        talking = [
            asyncio.create_task(_feed(process.stdin, task + b"\n")),
            asyncio.create_task(_hear(process.stdout, self._hear_result)),
            asyncio.create_task(_hear(process.stderr, self._hear_error)),
        ]
        status = await process.wait()
        self._signal(signal.SIGKILL)
        await clear()
        _, deaf = await asyncio.wait(talking, timeout=_LAST_WORDS_S)
        for one in deaf:  # a process that got away all the same may hold the pipe
            one.cancel()
        ended = self._read(attempt, status, scored)
        return msgspec.structs.replace(ended, output=self.output.text())

    def stop(self) -> None:
        """Ask it to end, and have it ended if it does not."""
        self._stopped = True
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(_GRACE_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _hear_result(self, data: bytes) -> None:
        self.output.add(data)
        self._results.add(data)

    def _hear_error(self, data: bytes) -> None:
        self.output.add(data)
        self._errors = (self._errors + data)[-_LONGEST:]

    def _read(self, attempt: str, status: int, scored: bool) -> AttemptEnd:
        if status != 0:
            return AttemptEnd(attempt, Outcome(Ending.AGENT_ERROR, self._failure(status)))
        return ended_with(attempt, from_json(self._results.value()), scored)

    def _failure(self, status: int) -> str:
        said = self._errors.decode(errors="replace")
        how = f"exit status {status}" if status > 0 else f"killed by {signal.Signals(-status).name}"
        if -status == signal.SIGXCPU:
            how += f": it used more than {self._limits.cpu_s:g} s of CPU time (`cpu_s`)"
        elif self._limits.memory_mb is not None and any(words in said for words in _NO_MEMORY):
            how += f": it wanted more than {self._limits.memory_mb} MB of memory (`memory_mb`)"
        return "\n".join([how, *said.rstrip().splitlines()[-_LINES:]])[:_LONGEST]


class LastDocument:
    """The last line that is JSON, of as many lines as may come."""

    def __init__(self) -> None:
        self._found: bytes | None = None
        self._line = bytearray()
        self._too_long = False

    def add(self, data: bytes) -> None:
        """Take some more of the lines."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"" if self._too_long else bytes(self._line) + lines[0]
            self._line, self._too_long = bytearray(), False
            self._found = next(filter(_is_json, reversed(lines)), self._found)
        self._line += rest
        if len(self._line) > LONGEST_RESULT:
            self._line, self._too_long = bytearray(), True

    def value(self) -> Any:
        """What the document says, a last line without an end included; None where there is none."""
        last = bytes(self._line) if _is_json(self._line) else self._found
        return None if last is None else msgspec.json.decode(last)


def _is_json(line: bytes | bytearray) -> bool:
    if not line.strip()[:1] or line.strip()[:1] not in b'{["-0123456789tfn':
        return False
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


async def _feed(pipe: asyncio.StreamWriter, task: bytes) -> None:
    with suppress(OSError, RuntimeError):  # a command need not read its task: the pipe, or uvloop's end of it, is shut
        pipe.write(task)
        await pipe.drain()
    pipe.close()


async def _hear(pipe: asyncio.StreamReader | None, hear: Callable[[bytes], None]) -> None:
    assert pipe is not None
    while data := await pipe.read(_CHUNK):
        hear(data)
