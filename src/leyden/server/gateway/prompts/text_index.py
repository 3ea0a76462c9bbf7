"""Finds the earlier call whose prompt and completion a new text begins with.

The history of such a call is its text in segments: given text, then the completion, then given text, and so on.
"""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from msgspec import Struct

from leyden.records import Call, CallStatus
from leyden.server.gateway.dialects.types import Message


class TextMatch(Struct, frozen=True):
    """The call that a text or its tokens begin with."""

    call: str
    segments: tuple[Message, ...]
    """The segments of the call; the last one is its completion."""


class TextIndex:
    """The calls of one attempt that continued a text, by their text and by their tokens."""

    def __init__(self) -> None:
        self._matches: dict[bytes, TextMatch] = {}
        self._text_lengths: set[int] = set()
        self._token_lengths: set[int] = set()

    def add(self, call: Call, prompt_ids: Callable[[], list[int]], messages: Sequence[Message]) -> None:
        """Add a call, if it continued a text and is complete. A call that sampled nothing has nothing to continue."""
        if not is_text(messages) or call.status is not CallStatus.OK or call.response is None:
            return
        if not call.completion_ids:
            return
        match = TextMatch(call.id, (*messages, call.response))
        text = joined(match.segments)
        self._matches[_new_digest(text).digest()] = match
        self._text_lengths.add(len(text))
        ids = [*prompt_ids(), *call.completion_ids]
        for length in {len(ids), len(ids) - 1}:  # the token that ended it may be left out
            self._matches[_new_digest(ids[:length]).digest()] = match
            self._token_lengths.add(length)

    def match(self, prompt: str | tuple[int, ...]) -> TextMatch | None:
        """Return the longest call that a prompt begins with, in one pass over the prompt."""
        digest, found, end = _new_digest(prompt[:0]), None, 0
        for length in sorted(self._text_lengths if isinstance(prompt, str) else self._token_lengths):
            if length > len(prompt):
                break
            digest.update(_bytes(prompt[end:length]))
            end = length
            found = self._matches.get(digest.digest(), found)
        return found


def segment(text: str) -> Message:
    """Return the message that records a given text."""
    return {"role": "text", "content": text}


def is_text(messages: Sequence[Message]) -> bool:
    """Whether a history is a text in segments."""
    return bool(messages) and messages[0].get("role") == "text"


def joined(segments: Sequence[Message]) -> str:
    """Return the text of segments."""
    return "".join(part["content"] for part in segments)


def _new_digest(prompt: str | Sequence[int]) -> blake2b:
    """Return the digest of a text or of tokens. It can be extended."""
    return blake2b(_bytes(prompt), digest_size=16, person=b"text" if isinstance(prompt, str) else b"tokens")


def _bytes(prompt: str | Sequence[int]) -> bytes:
    return prompt.encode(errors="surrogatepass") if isinstance(prompt, str) else array("I", prompt).tobytes()
