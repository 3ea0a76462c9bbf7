"""Finds a tool call that a model wrote as JSON, without the marks of its chat template.

Models that were trained little on tools end an answer with the JSON of a call, bare, in a fenced block, or in marks
spelt out as text. Only what ends the answer and names an offered tool is a call.
"""

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from leyden.rendering.renderer import ParsedToolCall

OPENINGS = ("```", "<tool_call>")
"""The texts that may begin such a call; it may also begin the answer without them."""
_BEGINNING = re.compile(r"(?:\A|```\w*|<tool_call>)\s*(?=\{)")
_ENDING = re.compile(r"[\s}`]*+(?:</tool_call>[\s`]*+)?")
_DECODER = json.JSONDecoder()


class UnmarkedCall(NamedTuple):
    """A tool call at the end of an answer."""

    text: str
    """The text before it."""
    call: ParsedToolCall


def find_unmarked_call(answer: str, tools: Collection[str]) -> UnmarkedCall | None:
    """Return the call of one of these tools that ends a complete answer."""
    for found in _BEGINNING.finditer(answer):
        start = found.end() + answer.startswith("{{", found.end())  # some templates show a call in doubled braces
        try:
            value, end = _DECODER.raw_decode(answer, start)
        except (ValueError, RecursionError):
            continue
        if _ENDING.fullmatch(answer, end) and _is_call(value, tools):
            call = ParsedToolCall(answer[start:end], value["name"], value["arguments"])
            return UnmarkedCall(answer[: found.start()].rstrip(), call)
    return None


def settled_length(answer: str) -> int:
    """Return how many characters of a growing answer cannot become part of such a call."""
    if answer.lstrip().startswith("{"):
        return 0
    return min((at for opening in OPENINGS if (at := answer.find(opening)) >= 0), default=len(answer))


def _is_call(value: Any, tools: Collection[str]) -> bool:
    name, arguments = (value.get("name"), value.get("arguments")) if isinstance(value, dict) else (None, None)
    return isinstance(name, str) and name in tools and isinstance(arguments, dict)
