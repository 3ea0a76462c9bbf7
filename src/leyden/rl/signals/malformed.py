"""Finds tool calls in the text of an answer that could not be parsed.

The gateway leaves a tool call that it cannot parse in the text of the answer. It begins with the marker that opens a
tool call in that family of models.
"""

import re

_MARKER = re.compile(
    r"(?<![`'\"])(?:"
    r"</?tool_calls?>|<\|tool_call>|<minimax:tool_call>|<function=|\[TOOL_CALLS\]|"
    r"<\|tool_call_begin\|>|<\|tool_calls_section_begin\|>|<｜tool▁calls?▁begin｜>|<｜DSML｜|"
    r"<\|python_tag\|>|<\|content_invoke_tool_(?:json|text)\|>|\bto=functions\."
    r")"
)


def unreadable_call(text: str) -> str | None:
    """Return the text from the first marker of a tool call on; None if there is none."""
    found = _MARKER.search(text)
    return text[found.start() :] if found else None
