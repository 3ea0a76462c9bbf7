"""Checks grammars in processes with limits of time and memory, so that no grammar can occupy the server.

A check that nobody waits for any more is ended. The checks of one session run one after another.
"""

import asyncio
import signal
import socket
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from leyden.engine.grammar import GrammarError
from leyden.engine.grammar_process import CPU_S, MEMORY_MB, CheckerSetup, CheckRequest
from leyden.process.framing import read_frame_blocking, to_frame

_PROCESSES = 2
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
        self._idle: list[_CheckerProcess] = []
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
            process = self._idle.pop() if self._idle else _CheckerProcess(self._setup)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    reply = await asyncio.to_thread(process.check, CheckRequest(*key))
            except BaseException as error:
                process.close()
                if isinstance(error, TimeoutError):
                    return _TOO_COSTLY
                raise
            if reply is None:
                process.close()
                return _TOO_COSTLY
            self._idle.append(process)
            return reply


class _CheckerProcess:
    """One process; it is killed by `close`, when it is no longer referenced, and when this process exits."""

    def __init__(self, setup: CheckerSetup) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "leyden.engine.grammar_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a Rust allocator that fails prints a backtrace
            )
        self.close = weakref.finalize(self, _end, self._process, self._socket)
        self._file = self._socket.makefile("rb")
        self._first = to_frame(msgspec.json.encode(setup))

    def check(self, request: CheckRequest) -> str | None:
        """Return the error of a grammar, empty where there is none; None where the process ended."""
        try:
            self._socket.sendall(self._first + to_frame(msgspec.json.encode(request)))
            self._first = b""
            reply = read_frame_blocking(self._file)
        except (OSError, ValueError):  # closed meanwhile
            return None
        return None if reply is None else msgspec.json.decode(reply, type=str)


def _end(process: "subprocess.Popen[bytes]", end: socket.socket) -> None:
    process.send_signal(signal.SIGKILL)
    end.close()
    process.wait()
