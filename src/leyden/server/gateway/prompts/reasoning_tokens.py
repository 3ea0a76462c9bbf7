"""Counts the tokens of an answer's reasoning."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""


def count_reasoning_tokens(tokenizer: TokenDecoder, ids: Sequence[int], reasoning: str) -> int:
    """Return how many tokens an answer has up to the end of its reasoning; 0 if its text does not contain it."""
    text = tokenizer.decode(ids)
    start = text.find(reasoning)
    if not reasoning or start < 0:
        return 0
    wanted = text[: start + len(reasoning)]
    return bisect_left(range(len(ids)), True, key=lambda length: tokenizer.decode(ids[:length]).startswith(wanted))
