"""Compiles grammars to check them: `python -m leyden.engine.grammar_process SOCKET`.

The kernel ends this process where a grammar takes more CPU time or memory than it may. A compilation cannot be
interrupted in any other way.
"""

import resource
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from leyden.engine.grammar import GrammarCompiler, GrammarError
from leyden.process.answering import answer_requests

CPU_S = 5
"""CPU time for one grammar."""
MEMORY_MB = 1024
"""Memory for one grammar, in addition to what the process has before."""


class CheckerSetup(Struct, frozen=True):
    """The first message: the arguments of `GrammarCompiler`."""

    tokenizer: str
    vocabulary: int


class CheckRequest(Struct, frozen=True):
    """Compile a grammar. The reply is a JSON string with the error; empty where there is none."""

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


if __name__ == "__main__":
    main(int(sys.argv[1]))
