"""Completions that follow a grammar: before each token, which tokens may come next.

Grammars are in the language of `llguidance` (Lark with JSON Schemas in it; `<[7]>` is the token with that id). Text
never matches a mark of the tokenizer, so a grammar has to name the marks that it allows.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from leyden.engine import EngineError

_KEPT = 64
"""Grammars that are kept ready: a group's calls ask for the same one again and again."""


class GrammarError(EngineError):
    """What was given is no grammar, or a grammar that this tokenizer or this library cannot follow."""


class Matcher:
    """Where one completion stands in its grammar."""

    def __init__(self, at: LLMatcher) -> None:
        self._at = at

    @property
    def trouble(self) -> str | None:
        """Why it cannot go on; None where it can."""
        return _first_line(self._at) if self._at.is_error() else None

    def allowed(self) -> bytes:
        """One bit for each token, the lowest first: whether it may come next. In trouble none may."""
        bits = self._at.compute_bitmask()
        return bytes(len(bits)) if self._at.is_error() else bits  # the library would have it end there

    def take(self, id: int) -> None:
        """Go on with a token."""
        self._at.consume_token(id)


class Grammars:
    """Makes the matchers of one model; safe to use from any thread."""

    def __init__(self, tokenizer: str, vocabulary: int) -> None:
        """`tokenizer` is a tokenizer.json in which every mark is special; there may be more ids than it knows."""
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._tokens: dict[tuple[int, ...], LLTokenizer] = {}
        self._ready: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, grammar: str, stop_ids: Sequence[int]) -> Matcher:
        """A matcher at the beginning of a completion that one of the stop ids ends. Raises `GrammarError`.

        The first of a grammar takes some milliseconds, and the very first what it takes to read the vocabulary.
        """
        with self._lock:
            ready = self._prepared(grammar, tuple(stop_ids))
            return Matcher(ready.deep_copy())

    def _prepared(self, grammar: str, stop_ids: tuple[int, ...]) -> LLMatcher:
        key = (grammar, stop_ids)
        if key not in self._ready:
            matcher = LLMatcher(self._tokens_until(stop_ids), grammar, log_level=0)
            if matcher.is_error():
                raise GrammarError(_first_line(matcher))
            self._ready[key] = matcher
        self._ready.move_to_end(key)
        if len(self._ready) > _KEPT:
            self._ready.popitem(last=False)
        return self._ready[key]

    def _tokens_until(self, stop_ids: tuple[int, ...]) -> LLTokenizer:
        if stop_ids not in self._tokens:
            try:
                self._tokens[stop_ids] = LLTokenizer(self._tokenizer, self._vocabulary, list(stop_ids))
            except Exception as error:  # the library says neither which
                raise GrammarError(f"grammars cannot follow this model's tokens: {error}") from error
        return self._tokens[stop_ids]


def _first_line(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0]  # what follows is the library's state
