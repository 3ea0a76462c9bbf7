"""Remembers how recent texts were encoded: the rollouts of a group and the turns of an agent repeat most of theirs."""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

_MAX_CHARACTERS = 1 << 23
"""Of all texts that are remembered together."""
_MAX_TEXT = 1 << 16
"""Longer texts are not remembered, so that a few of them do not displace all others."""


class EncodingCache:
    """Encodes texts, those that it remembers without the tokenizer. Safe to use from several threads."""

    def __init__(self, encode: Callable[[str], list[int]], max_characters: int = _MAX_CHARACTERS) -> None:
        self._encode, self._max_characters = encode, max_characters
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        with self._lock:
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
                return known.tolist()
        ids = self._encode(text)
        if len(text) <= _MAX_TEXT:
            self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: list[int]) -> None:
        with self._lock:
            if text in self._known:  # another thread was faster
                return
            self._known[text] = array("I", ids)
            self._characters += len(text)
            while self._characters > self._max_characters:
                self._characters -= len(self._known.popitem(last=False)[0])
