"""Derives the variant of ChatML that a model uses from its own template, by rendering probe conversations.

A template counts as ChatML only if it renders every probe as our renderer does, so one that trims, dates, reorders or
drops anything does not.
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
    """One model's variant of ChatML. The wording for tools is ours where its template has none."""

    default_system: str | None = None
    """The system message that the template adds to a conversation without one."""
    tools_before: str = _TOOLS_BEFORE
    tools_after: str = _TOOLS_AFTER
    bare_tools: bool = False
    """Whether a tool is written without the `{"type": "function", "function": ...}` around it."""
    knows_tools: bool = False
    """Whether the model's own template has tools, calls and results."""
    keeps_reasoning: bool = False
    """Whether an assistant's reasoning is written, in `<think>` before its answer."""

    def show_tool(self, tool: Mapping[str, Any]) -> str:
        """Return a tool as the prompt shows it."""
        return as_json(tool["function"] if self.bare_tools and "function" in tool else tool)


def as_json(value: Any) -> str:
    """Encode JSON as templates do."""
    return json.dumps(value, ensure_ascii=False)


def read_form(tokenizer: Tokenizer) -> ChatMLForm | None:
    """Derive the variant from the template; None if it is not ChatML. `probes` have to confirm it."""
    template = tokenizer.chat_template
    if template is None or "<|im_start|>" not in template or "strftime_now" in template:
        return None
    question = {"role": "user", "content": "U"}
    try:
        plain = _render(tokenizer, [question])
        with_tools = _render(tokenizer, [{"role": "system", "content": "S"}, question], TOOLS)
        reasoned = _render(tokenizer, [question, {"role": "assistant", "content": "A", "reasoning_content": "R"}])
    except TemplateError:
        return None
    head, _, _ = plain.partition("<|im_start|>user\n")
    default = head.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n") if head else None
    keeps = "<think>\nR\n</think>\n\nA<|im_end|>" in reasoned
    with_tools = with_tools.removeprefix("<|im_start|>system\nS").partition("<|im_end|>\n<|im_start|>user\n")[0]
    for bare in (False, True):
        shown = "".join("\n" + as_json(tool["function"] if bare else tool) for tool in TOOLS)
        before, found, after = with_tools.partition(shown)
        if found:
            return ChatMLForm(default, before, after, bare, knows_tools=True, keeps_reasoning=keeps)
    return ChatMLForm(default, keeps_reasoning=keeps)


def probes(knows_tools: bool) -> list[tuple[list[Any], list[Any] | None]]:
    """Return conversations, with tools, on which ChatML templates and similar ones differ."""
    system, question, answer = (
        _message("system", " S\n"),
        _message("user", "  U\n\n1234 \u00e9 "),
        _message("assistant", "\tA "),
    )
    thought = {**_message("assistant", "<think>\nw\n</think>\n\nA"), "reasoning_content": "R"}
    plain = [
        [question],
        [system, question],
        [_message("system", ""), _message("user", ""), _message("assistant", ""), _message("user", "")],
        [question, answer, question, answer, question],
        [system, question, thought, question, thought],
        [question, _message("system", "T"), question, question],
        [system, answer, answer],
    ]
    if not knows_tools:
        return [(messages, None) for messages in plain]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"b": [1.5, None], "a": "<\u00e9>"}}}
    result = {**_message("tool", " T\n{}"), "tool_call_id": "c"}
    calling = [
        [question, {**_message("assistant", ""), "tool_calls": [call]}, result, answer, question],
        [question, {**_message("assistant", "A"), "tool_calls": [call, call]}, result, result, _message("user", "U")],
        [system, question, {**answer, "tool_calls": [call]}, result, {**thought, "tool_calls": [call]}, result],
    ]
    return [(messages, tools) for tools in (None, TOOLS) for messages in (*plain, *calling)]


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "<'D' & \u00e9>", "parameters": {"z": {}, "a": []}}}
    for name in ("f", "g")
]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
