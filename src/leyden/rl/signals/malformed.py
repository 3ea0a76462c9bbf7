"""Text in which a model tried to call a tool and did not keep to the form.

What cannot be read as a call is shown to the agent as it was written, behind the text of the answer, with the mark that
opens a call in that family of models.
"""

import re

_MARK = re.compile(
    r"(?<![`'\"])(?:"
    r"</?tool_calls?>|<\|tool_call>|<minimax:tool_call>|<function=|\[TOOL_CALLS\]|"
    r"<\|tool_call_begin\|>|<\|tool_calls_section_begin\|>|<｜tool▁calls?▁begin｜>|<｜DSML｜|"
    r"<\|python_tag\|>|<\|content_invoke_tool_(?:json|text)\|>|\bto=functions\."
    r")"
)


def unreadable_call(text: str) -> str | None:
    """The beginning of a tool call that stands in a text; None where there is none."""
    found = _MARK.search(text)
    return text[found.start() :] if found else None
