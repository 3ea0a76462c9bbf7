"""Checks grammars in processes with limits of time and memory, so that no grammar can occupy the server.

A check that nobody waits for any more is ended. The checks of one session run one after another.
"""

import asyncio
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from leyden.engine.grammar import GrammarError
from leyden.engine.grammar_process import CPU_S, MEMORY_MB, CheckerSetup, CheckRequest
from leyden.process.answering import AnsweringProcess

_MODULE, _PROCESSES = "leyden.engine.grammar_process", 2
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
        self._running: dict[_Key, asyncio.Task[str]] = {}
        self._waiting: Counter[_Key] = Counter()
        self._sessions: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def check(self, grammar: str, stop_ids: Sequence[int], session: str) -> None:
        """Raise `GrammarError` where a grammar is invalid or takes too much time or memory."""
        key = (grammar, tuple(stop_ids))
        error = self._known.get(key)
        if error is None:
            error = await self._wait(key, session)
            self._known[key] = error
            if len(self._known) > _KNOWN_GRAMMARS:
                self._known.popitem(last=False)
        if error:
            raise GrammarError(error)

    async def _wait(self, key: _Key, session: str) -> str:
        """Wait for the check of a grammar, which starts with the first caller and is cancelled with the last."""
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._run(key, session))
        self._waiting[key] += 1
        try:
            return await asyncio.shield(running)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                running.cancel()
                del self._waiting[key], self._running[key]

    async def _run(self, key: _Key, session: str) -> str:
        lock = self._sessions.setdefault(session, asyncio.Lock())
        async with lock, self._slots:
            process = self._idle.pop() if self._idle else AnsweringProcess(_MODULE, msgspec.json.encode(self._setup))
            reply = await process.ask(msgspec.json.encode(CheckRequest(*key)), _TIMEOUT_S)
            if reply is None:
                return _TOO_COSTLY
            self._idle.append(process)
            return msgspec.json.decode(reply, type=str)
