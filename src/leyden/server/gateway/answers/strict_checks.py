"""Counts how the calls of strict tools follow their schemas, where no grammar enforced them.

Agents send any schema. So the calls are checked in a process of their own, after they were answered: no schema can take
the server's time or delay an answer. What cannot be checked in time counts as unchecked.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from leyden.background import start_background

_COMMAND = (sys.executable, "-P", "-m", "leyden.server.gateway.answers.strict_process")
_MAX_WAITING, _MAX_OF_SESSION = 256, 8
"""Answers whose calls wait to be checked, in all and of one session."""
_TIMEOUT_S = 10.0
"""For the calls of one answer; the process itself limits its CPU time to a second."""


class StrictChecks:
    """Checks calls one answer after another, and counts the results."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Calls as `valid`, `invalid` or `unchecked`."""
        self._waiting: deque[tuple[str, Sequence[tuple[str, Any]]]] = deque()
        self._of_session: Counter[str] = Counter()
        self._process: Process | None = None
        self._checking: asyncio.Task[None] | None = None

    def add(self, session: str, calls: Sequence[tuple[str, Any]]) -> None:
        """Have the calls of one answer checked: pairs of the text of the arguments and the schema."""
        if len(self._waiting) >= _MAX_WAITING or self._of_session[session] >= _MAX_OF_SESSION:
            self.counts["unchecked"] += len(calls)
            return
        self._waiting.append((session, calls))
        self._of_session[session] += 1
        if self._checking is None or self._checking.done():
            self._checking = start_background(self._check_waiting(), "the checks of strict tools")

    async def close(self) -> None:
        """End the process."""
        if self._checking is not None:
            self._checking.cancel()
        await self._kill()

    async def _check_waiting(self) -> None:
        while self._waiting:
            session, calls = self._waiting.popleft()
            self._of_session[session] -= 1
            if not self._of_session[session]:
                del self._of_session[session]
            try:
                if self._process is None:
                    self._process = await asyncio.create_subprocess_exec(
                        *_COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
                    )
                    await _check(self._process, ())  # it begins with imports, which take long on a busy machine
                async with asyncio.timeout(_TIMEOUT_S):
                    results = await _check(self._process, calls)
            except (TimeoutError, OSError, ValueError):  # also a line that is no JSON, or too long
                await self._kill()
                results = ["unchecked"] * len(calls)
            self.counts.update(results)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _check(process: Process, calls: Sequence[tuple[str, Any]]) -> list[str]:
    reader, writer = process.stdout, process.stdin
    assert reader is not None and writer is not None
    writer.write(msgspec.json.encode(calls) + b"\n")
    await writer.drain()
    return msgspec.json.decode(await reader.readline(), type=list[str])
