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
        self._matches[_text_digest(text)] = match
        self._text_lengths.add(len(text))
        ids = [*prompt_ids(), *call.completion_ids]
        for length in {len(ids), len(ids) - 1}:  # the token that ended it may be left out
            self._matches[_token_digest(ids[:length])] = match
            self._token_lengths.add(length)

    def match(self, prompt: str | tuple[int, ...]) -> TextMatch | None:
        """Return the longest call that a prompt begins with."""
        lengths = self._text_lengths if isinstance(prompt, str) else self._token_lengths
        for length in sorted(lengths, reverse=True):
            if length <= len(prompt):
                start = prompt[:length]
                digest = _text_digest(start) if isinstance(start, str) else _token_digest(start)
                if (found := self._matches.get(digest)) is not None:
                    return found
        return None


def segment(text: str) -> Message:
    """Return the message that records a given text."""
    return {"role": "text", "content": text}


def is_text(messages: Sequence[Message]) -> bool:
    """Whether a history is a text in segments."""
    return bool(messages) and messages[0].get("role") == "text"


def joined(segments: Sequence[Message]) -> str:
    """Return the text of segments."""
    return "".join(part["content"] for part in segments)


def _text_digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _token_digest(ids: Sequence[int]) -> bytes:
    return blake2b(array("I", ids).tobytes(), digest_size=16, person=b"tokens").digest()
