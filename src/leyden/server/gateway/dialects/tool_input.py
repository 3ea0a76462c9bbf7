"""The input of a tool call in the APIs of Anthropic and Google, which is always a JSON object.

As in Anthropic's service Messages streams it one whole property at a time, since clients parse what has arrived after
each part. Arguments that are no JSON object end with a property that has all of their text, streamed or whole.
"""

import json
import re

import msgspec

from leyden.server.gateway.dialects.types import ToolCall

INVALID_JSON = "INVALID_JSON"
"""The property that holds malformed arguments, by the name that Anthropic's documentation suggests."""
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}\[\],]', re.DOTALL)


class ToolInput:
    """The arguments of one call, as far as they have arrived."""

    def __init__(self) -> None:
        self._text = ""
        self._end = 0
        """Where the last whole property ends: at a comma. Before there is one, at the opening brace."""
        self._next_scan = 0

    def feed(self, arguments: str) -> str:
        """Add to the arguments; return the text up to the end of the last whole property that was not returned yet.

        Each scan reads the open property again, so the distance between scans grows with it to keep the cost linear.
        """
        self._text += arguments
        return self._scan() if len(self._text) >= self._next_scan else ""

    def finish(self) -> str:
        """Return the rest of the object."""
        new = self._scan()
        if _decoded(self._text) is not None:
            return new + self._text[self._end :]
        return f"{new}{', ' if self._end else '{'}{json.dumps(INVALID_JSON)}: {json.dumps(self._text)}}}"

    def _scan(self) -> str:
        start, depth = self._end, 1
        for part in _PARTS.finditer(self._text, start + 1 if self._text.startswith("{") else len(self._text)):
            depth += (part[0] in "{[") - (part[0] in "}]")
            if depth == 1 and part[0] == ",":
                if not _decoded("{" + self._text[self._end + 1 : part.start()] + "}"):
                    break
                self._end = part.start()
        self._next_scan = len(self._text) + (len(self._text) - self._end) // 16
        return self._text[start : self._end]


def input_of(call: ToolCall) -> dict[str, object]:
    """Return the input of a whole call."""
    written = ToolInput()
    return _decoded(written.feed(call.arguments) + written.finish()) or {}


def _decoded(text: str) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
