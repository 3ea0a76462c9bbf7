"""Counts how the calls of strict tools follow their schemas, if no grammar enforced them.

Agents send any schema. So the calls are checked after they were answered, in a process of their own (`main`): no schema
can take the server's time or delay an answer. What cannot be checked in time counts as unchecked.
"""

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from leyden.background import start_background
from leyden.process.answering import AnsweringProcess, answer_requests

_MODULE = "leyden.server.gateway.answers.strict_checks"
_CHECK_S = 1.0
"""CPU time for the schemas of one answer."""
_MAX_WAITING, _MAX_OF_SESSION = 256, 8
"""Answers whose calls wait to be checked, in all and of one session."""
_TIMEOUT_S = 10.0
"""For the calls of one answer, on a busy machine."""


def main(fd: int) -> None:
    """Check calls until the socket closes. A request is a list of pairs as `StrictChecks.add` takes it."""
    from leyden.rl.signals.schemas import CheckTime, check_text  # slow to import, and the server does without

    decode = msgspec.json.Decoder(list[tuple[str, Any]]).decode

    def answer(body: bytes) -> bytes:
        allowed = CheckTime(_CHECK_S)
        return msgspec.json.encode([check_text(text, schema, allowed).result for text, schema in decode(body)])

    answer_requests(fd, answer)


class StrictChecks:
    """Checks calls one answer after another, and counts the results."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Calls as `valid`, `invalid` or `unchecked`."""
        self._waiting: deque[tuple[str, Sequence[tuple[str, Any]]]] = deque()
        self._of_session: Counter[str] = Counter()
        self._process: AnsweringProcess | None = None
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
            await asyncio.wait({self._checking})
        if self._process is not None:
            self._process.close()

    async def _check_waiting(self) -> None:
        while self._waiting:
            session, calls = self._waiting.popleft()
            self._of_session[session] -= 1
            if not self._of_session[session]:
                del self._of_session[session]
            reply = None
            with suppress(OSError):  # no process can be started
                self._process = self._process or AnsweringProcess(_MODULE, b"[]")
                reply = await self._process.ask(msgspec.json.encode(calls), _TIMEOUT_S)
            if reply is None:
                self._process = None
                self.counts["unchecked"] += len(calls)
            else:
                self.counts.update(msgspec.json.decode(reply, type=list[str]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
