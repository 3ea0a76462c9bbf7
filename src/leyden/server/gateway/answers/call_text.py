"""Reads a tool call from text that is still being written: `{"name": ..., "arguments": {...}`.

This is how most models write calls. A call in another format is read when it is complete, by the model's renderer.
"""

import json
import re
from typing import NamedTuple

_HEAD = re.compile(
    r'(?:<tool_call>)?\s*\{\s*"name"\s*:\s*("(?:[^"\\\n]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_END = "</tool_call>"
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)


class CallText(NamedTuple):
    """A tool call as far as it is written."""

    name: str
    arguments: str
    """The text of the arguments so far; later text only appends to it."""
    complete: bool
    """Whether the arguments are closed."""


def read_call_text(text: str) -> CallText | None:
    """Read a call; None where its name is not complete, or it is in another format."""
    head = _HEAD.match(text)
    if head is None:
        return None
    try:
        name = json.loads(head[1])
    except ValueError:
        return None
    depth = 0
    for part in _PARTS.finditer(text, head.end()):
        if part[0] in "{[":
            depth += 1
        elif part[0] in "}]":
            depth -= 1
            if not depth:
                return CallText(name, text[head.end() : part.end()], True)
    # An incomplete character decodes to U+FFFD, and white space may be cut off by the renderer.
    arguments = text[head.end() :].rstrip().rstrip("\ufffd").rstrip()
    mark = arguments.rfind("<")
    if mark >= 0 and _END.startswith(arguments[mark:]):
        arguments = arguments[:mark].rstrip()
    return CallText(name, arguments, False)
