"""Remembers how recent texts were encoded: the rollouts of a group and the turns of an agent repeat most of theirs."""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

_MAX_BYTES, _MAX_ENTRIES = 24 << 20, 1 << 14
"""Of all texts that are remembered together, with their tokens."""
_MAX_TEXT = 1 << 16
"""Longer texts are not remembered, so that a few of them do not displace all others."""
_ENTRY_BYTES = 200
"""What an entry takes in the dictionary."""


class EncodingCache:
    """Encodes texts, those that it remembers without the tokenizer. Safe to use from several threads."""

    def __init__(
        self, encode: Callable[[str], list[int]], max_bytes: int = _MAX_BYTES, max_entries: int = _MAX_ENTRIES
    ) -> None:
        self._encode, self._max_bytes, self._max_entries = encode, max_bytes, max_entries
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
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
            self._remember(text, array("I", ids))
        return ids

    def _remember(self, text: str, ids: "array[int]") -> None:
        with self._lock:
            if text in self._known:  # another thread was faster
                return
            self._known[text] = ids
            self._bytes += _size(text, ids)
            while self._bytes > self._max_bytes or len(self._known) > self._max_entries:
                self._bytes -= _size(*self._known.popitem(last=False))


def _size(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_BYTES
