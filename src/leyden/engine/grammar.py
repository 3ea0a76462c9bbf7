"""Grammar-constrained decoding: computes, before each token, which tokens the grammar allows next.

Grammars are written in the language of `llguidance` (Lark with embedded JSON Schemas; `<[7]>` is the token with id 7).
Text never matches a special token, so a grammar must name every special token that it allows.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from leyden.engine.protocol import EngineError

_CACHED_GRAMMARS = 16
"""Compiled grammars that are kept: the calls of a group use the same one again and again."""
_THREADS = 2
_LIMITS = LLParserLimits(max_items_in_row=50_000, step_max_items=200_000, verbose_errors=False)
"""Enough for objects with thousands of optional properties, and at most ten milliseconds per token."""


class GrammarError(EngineError):
    """The grammar is invalid, or this tokenizer or library does not support it."""


class GrammarMatcher:
    """The state of one completion in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why the completion cannot continue; None if it can."""
        return _error(self._matcher) if self._matcher.is_error() else None

    def allowed_bitmask(self) -> bytes:
        """Return one bit per token, lowest first: whether it may come next. After an error, no token may."""
        bits = self._matcher.compute_bitmask()
        return bytes(len(bits)) if self._matcher.is_error() else bits  # the library would allow a stop token

    def accept(self, id: int) -> None:
        """Advance by a sampled token."""
        self._matcher.consume_token(id)


class GrammarCompiler:
    """Compiles grammars for one model, in threads since some take long, and creates their matchers."""

    def __init__(self, tokenizer: str, vocabulary: int) -> None:
        """`tokenizer` is a tokenizer.json in which every added token is special; `vocabulary` may be larger than it."""
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._ll_tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._lock = threading.Lock()
        threads = ThreadPoolExecutor(_THREADS, "leyden-grammar")
        self._compiling = lru_cache(_CACHED_GRAMMARS)(lambda *key: threads.submit(self.compile, *key))

    async def new_matcher(self, grammar: str, stop_ids: Sequence[int]) -> GrammarMatcher:
        """Create a matcher for a new completion, which one of the stop ids ends. Raises `GrammarError`."""
        compiling = asyncio.wrap_future(self._compiling(grammar, tuple(stop_ids)))
        return GrammarMatcher((await asyncio.shield(compiling)).deep_copy())

    def compile(self, grammar: str, stop_ids: tuple[int, ...]) -> LLMatcher:
        """Compile a grammar. It cannot be interrupted, so check the grammars of others first (`grammar_checker`)."""
        matcher = LLMatcher(self.load_tokenizer(stop_ids), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_error(matcher))
        return matcher

    def load_tokenizer(self, stop_ids: tuple[int, ...]) -> LLTokenizer:
        """Return the library's tokenizer for these stop ids."""
        with self._lock:  # building one takes long
            if stop_ids not in self._ll_tokenizers:
                try:
                    self._ll_tokenizers[stop_ids] = LLTokenizer(self._tokenizer, self._vocabulary, list(stop_ids))
                except Exception as error:  # the library does not document which
                    raise GrammarError(f"grammars cannot follow this model's tokens: {error}") from error
            return self._ll_tokenizers[stop_ids]


def _error(matcher: LLMatcher) -> str:
    """Return the matcher's error in one line: its first line, and the reason if that is on another."""
    first, *others = matcher.get_error().splitlines()
    return " ".join([first, *(line.removeprefix("error: ") for line in others if line.startswith("error: "))])
