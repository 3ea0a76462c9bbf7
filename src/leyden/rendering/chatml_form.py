"""In what the members of the ChatML family differ, read off a model's own template by showing it conversations.

A template is taken for a member only if, on every conversation that it is shown, it writes what the renderer writes.
So a template that trims, dates, reorders or drops anything is no member, whatever it looks like.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.rendering.chat_template import TemplateError
from leyden.rendering.tokenizer import Tokenizer

_TOOLS_BEFORE = "\n\nYou may call these tools:\n<tools>"
_TOOLS_AFTER = (
    "\n</tools>\n\nTo call a tool, write its name and its arguments as JSON, each call in a block of its own:\n"
    '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
)


@dataclass(frozen=True)
class ChatMLForm:
    """How one model writes ChatML; the tools' wording is ours where its template knows no tools."""

    default_system: str | None = None
    """The system message of a conversation that has none."""
    tools_before: str = _TOOLS_BEFORE
    tools_after: str = _TOOLS_AFTER
    bare_tools: bool = False
    """Whether a tool is shown without the `{"type": "function", "function": ...}` around it."""
    knows_tools: bool = False
    """Whether the model's own template has tools, calls and results."""
    keeps_reasoning: bool = False
    """Whether an assistant's reasoning is written, in `<think>` before its answer."""

    def show_tool(self, tool: Mapping[str, Any]) -> str:
        """A tool as the model reads it."""
        return as_json(tool["function"] if self.bare_tools and "function" in tool else tool)


def as_json(value: Any) -> str:
    """JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def read_form(tokenizer: Tokenizer) -> ChatMLForm | None:
    """The form of a model's template, as far as one look tells; None where it is no ChatML at all."""
    template = tokenizer.chat_template
    if template is None or "<|im_start|>" not in template or "strftime_now" in template:
        return None
    ask = {"role": "user", "content": "U"}
    try:
        plain = _written(tokenizer, [ask])
        told = _written(tokenizer, [{"role": "system", "content": "S"}, ask], TOOLS)
        thought = _written(tokenizer, [ask, {"role": "assistant", "content": "A", "reasoning_content": "R"}])
    except TemplateError:
        return None
    head, _, _ = plain.partition("<|im_start|>user\n")
    default = head.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n") if head else None
    keeps = "<think>\nR\n</think>\n\nA<|im_end|>" in thought
    told = told.removeprefix("<|im_start|>system\nS").partition("<|im_end|>\n<|im_start|>user\n")[0]
    for bare in (False, True):
        shown = "".join("\n" + as_json(tool["function"] if bare else tool) for tool in TOOLS)
        before, found, after = told.partition(shown)
        if found:
            return ChatMLForm(default, before, after, bare, knows_tools=True, keeps_reasoning=keeps)
    return ChatMLForm(default, keeps_reasoning=keeps)


def probes(knows_tools: bool) -> list[tuple[list[Any], list[Any] | None]]:
    """Conversations on which members and look-alikes part: messages, and tools."""
    system, ask, answer = _said("system", " S\n"), _said("user", "  U\n\n1234 \u00e9 "), _said("assistant", "\tA ")
    thought = {**_said("assistant", "<think>\nw\n</think>\n\nA"), "reasoning_content": "R"}
    plain = [
        [ask],
        [system, ask],
        [_said("system", ""), _said("user", ""), _said("assistant", ""), _said("user", "")],
        [ask, answer, ask, answer, ask],
        [system, ask, thought, ask, thought],
        [ask, _said("system", "T"), ask, ask],
        [system, answer, answer],
    ]
    if not knows_tools:
        return [(messages, None) for messages in plain]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"b": [1.5, None], "a": "<\u00e9>"}}}
    result = {**_said("tool", " T\n{}"), "tool_call_id": "c"}
    calling = [
        [ask, {**_said("assistant", ""), "tool_calls": [call]}, result, answer, ask],
        [ask, {**_said("assistant", "A"), "tool_calls": [call, call]}, result, result, _said("user", "U")],
        [system, ask, {**answer, "tool_calls": [call]}, result, {**thought, "tool_calls": [call]}, result],
    ]
    return [(messages, tools) for tools in (None, TOOLS) for messages in (*plain, *calling)]


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "<'D' & \u00e9>", "parameters": {"z": {}, "a": []}}}
    for name in ("f", "g")
]


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _written(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
