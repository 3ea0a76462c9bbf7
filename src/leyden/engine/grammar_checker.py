"""Checks grammars in processes with limits of time and memory, so that no grammar can occupy the server.

A compilation cannot be interrupted, so the kernel ends a process (`python -m leyden.engine.grammar_checker SOCKET`)
whose grammar takes more CPU time or memory than it may. A check whose caller is gone is ended, and begun again if
others wait for it. The checks of one session run one after another.
"""

import asyncio
import resource
import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from leyden.engine.grammar import GrammarCompiler, GrammarError
from leyden.process.answering import AnsweringProcess, answer_requests

CPU_S = 5
"""CPU time for one grammar."""
MEMORY_MB = 1024
"""Memory for one grammar, in addition to what the process has before."""


class CheckerSetup(Struct, frozen=True):
    """The first message: the arguments of `GrammarCompiler`."""

    tokenizer: str
    vocabulary: int


class CheckRequest(Struct, frozen=True):
    """Compile a grammar. The reply is a JSON string with the error; empty if there is none."""

    grammar: str
    stop_ids: tuple[int, ...]


def main(fd: int) -> None:
    """Check grammars until the socket closes."""
    compiler: GrammarCompiler | None = None

    def answer(body: bytes) -> bytes:
        nonlocal compiler
        if compiler is None:
            setup = msgspec.json.decode(body, type=CheckerSetup)
            compiler = GrammarCompiler(setup.tokenizer, setup.vocabulary)
            return b""
        request = msgspec.json.decode(body, type=CheckRequest)
        error = ""
        try:
            compiler.load_tokenizer(request.stop_ids)
            _limit()
            compiler.compile(request.grammar, request.stop_ids)
        except GrammarError as refused:
            error = str(refused) or "it is invalid"
        return msgspec.json.encode(error)

    answer_requests(fd, answer)


def _limit() -> None:
    """Let the kernel kill this process when the next grammar exceeds its limits."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (MEMORY_MB << 20), hard))


_MODULE, _PROCESSES = "leyden.engine.grammar_checker", 2
_KNOWN_GRAMMARS = 256
_TIMEOUT_S = 60.0
"""For a process that neither replies nor uses CPU time."""
_TOO_COSTLY = f"it takes more than {CPU_S} s of CPU time or {MEMORY_MB} MB of memory to build: simplify its schema"

_Key = tuple[str, tuple[int, ...]]


class GrammarChecker:
    """Decides whether a grammar can be compiled within the limits; remembers the answers."""

    def __init__(self, tokenizer: str, vocabulary: int) -> None:
        self._setup = CheckerSetup(tokenizer, vocabulary)
        self._slots = asyncio.Semaphore(_PROCESSES)
        self._idle: list[AnsweringProcess] = []
        self._known: OrderedDict[_Key, str] = OrderedDict()
        self._locks: weakref.WeakValueDictionary[_Key | str, asyncio.Lock] = weakref.WeakValueDictionary()
        """By grammar, which is checked once for all who wait for it, and by session."""

    async def check(self, grammar: str, stop_ids: Sequence[int], session: str) -> None:
        """Raise `GrammarError` if a grammar is invalid or takes too much time or memory."""
        key = (grammar, tuple(stop_ids))
        async with self._locks.setdefault(key, asyncio.Lock()):
            error = self._known.get(key)
            if error is None:
                async with self._locks.setdefault(session, asyncio.Lock()), self._slots:
                    error = self._known[key] = await self._run(key)
                if len(self._known) > _KNOWN_GRAMMARS:
                    self._known.popitem(last=False)
        if error:
            raise GrammarError(error)

    async def _run(self, key: _Key) -> str:
        request, reply = msgspec.json.encode(CheckRequest(*key)), None
        if self._idle:
            process = self._idle.pop()
            reply = await process.ask(request, _TIMEOUT_S)
        if reply is None:  # the idle process may have died before
            process = AnsweringProcess(_MODULE, msgspec.json.encode(self._setup))
            reply = await process.ask(request, _TIMEOUT_S)
        if reply is None:
            return _TOO_COSTLY
        self._idle.append(process)
        return msgspec.json.decode(reply, type=str)


if __name__ == "__main__":
    main(int(sys.argv[1]))
