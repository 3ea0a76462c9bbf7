"""Completions that follow a grammar: before each token, which tokens may come next.

Grammars are in the language of `llguidance` (Lark with JSON Schemas in it; `<[7]>` is the token with that id). Text
never matches a mark of the tokenizer, so a grammar has to name the marks that it allows.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from leyden.engine.protocol import EngineError

_KEPT = 16
"""Grammars that are kept ready: a group's calls ask for the same one again and again."""
_THREADS = 2
_LIMITS = LLParserLimits(max_items_in_row=50_000, step_max_items=200_000, verbose_errors=False)
"""Enough for objects with thousands of optional properties, and ten milliseconds a token at the worst."""


class GrammarError(EngineError):
    """What was given is no grammar, or a grammar that this tokenizer or this library cannot follow."""


class Matcher:
    """Where one completion stands in its grammar."""

    def __init__(self, at: LLMatcher) -> None:
        self._at = at

    @property
    def trouble(self) -> str | None:
        """Why it cannot go on; None where it can."""
        return _error(self._at) if self._at.is_error() else None

    def allowed(self) -> bytes:
        """One bit for each token, the lowest first: whether it may come next. In trouble none may."""
        bits = self._at.compute_bitmask()
        return bytes(len(bits)) if self._at.is_error() else bits  # the library would have it end there

    def take(self, id: int) -> None:
        """Go on with a token."""
        self._at.consume_token(id)


class Grammars:
    """Makes the matchers of one model. Grammars are read by threads of its own: some take long."""

    def __init__(self, tokenizer: str, vocabulary: int) -> None:
        """`tokenizer` is a tokenizer.json in which every mark is special; there may be more ids than it knows."""
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._tokens: dict[tuple[int, ...], LLTokenizer] = {}
        self._ready: OrderedDict[tuple[str, tuple[int, ...]], Future[LLMatcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, "leyden-grammar")
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()

    async def begin(self, grammar: str, stop_ids: Sequence[int]) -> Matcher:
        """A matcher at the beginning of a completion that one of the stop ids ends. Raises `GrammarError`."""
        reading = asyncio.wrap_future(self._reading(grammar, tuple(stop_ids)))
        return Matcher((await asyncio.shield(reading)).deep_copy())

    def _reading(self, grammar: str, stop_ids: tuple[int, ...]) -> "Future[LLMatcher]":
        key = (grammar, stop_ids)
        with self._lock:
            if key not in self._ready:
                self._ready[key] = self._threads.submit(self._read, *key)
            self._ready.move_to_end(key)
            if len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
            return self._ready[key]

    def _read(self, grammar: str, stop_ids: tuple[int, ...]) -> LLMatcher:
        matcher = LLMatcher(self._tokens_until(stop_ids), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_error(matcher))
        return matcher

    def _tokens_until(self, stop_ids: tuple[int, ...]) -> LLTokenizer:
        with self._vocabulary_lock:  # which takes long: nobody's event loop waits for this one
            if stop_ids not in self._tokens:
                try:
                    self._tokens[stop_ids] = LLTokenizer(self._tokenizer, self._vocabulary, list(stop_ids))
                except Exception as error:  # the library does not say which
                    raise GrammarError(f"grammars cannot follow this model's tokens: {error}") from error
            return self._tokens[stop_ids]


def _error(matcher: LLMatcher) -> str:
    """What is wrong, in one line: the first, and the reason where the library gives it in another."""
    first, *others = matcher.get_error().splitlines()
    return " ".join([first, *(line.removeprefix("error: ") for line in others if line.startswith("error: "))])
