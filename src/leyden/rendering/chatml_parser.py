"""Parses the answers of ChatML models from their tokens.

Parsing is lossless: rendering the parsed answer gives the text that the model wrote. If the model has control tokens
for tool calls and reasoning, only those open and close them; text that looks the same stays text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from leyden.rendering.renderer import ParsedResponse, ParsedToolCall, ToolCallStatus
from leyden.rendering.tokenizer import Tokenizer

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class ParsedReasoning(NamedTuple):
    """The reasoning at the beginning of an answer."""

    text: str | None
    end: int
    """The position of the first token after it."""
    complete: bool


class AnswerParser:
    """Parses the answers of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.control_tokens
        self._start = tokens.get("<|im_start|>")
        self._call, self._call_end = tokens.get("<tool_call>"), tokens.get("</tool_call>")
        self._think, self._think_end = tokens.get("<think>"), tokens.get("</think>")
        self.tool_call_texts = ("<tool_call>",) if self._call is None or self._call_end is None else ()

    def parse(self, ids: Sequence[int], prompt: Sequence[int]) -> ParsedResponse:
        """Parse an answer without its stop token into text, reasoning and tool calls, malformed ones included."""
        reasoning, start, complete = self.reasoning(ids, prompt)
        texts, calls = self._calls_in_text(ids[start:]) if self.tool_call_texts else self._calls(ids, start)
        first, *others = texts
        if reasoning is not None:
            first = first.removeprefix("\n").removeprefix("\n")
        if calls:
            first = first.removesuffix("\n")
        content = "\n".join(filter(None, (first, *(text.strip() for text in others))))
        return ParsedResponse(content, reasoning, calls, complete)

    def reasoning(self, ids: Sequence[int], prompt: Sequence[int]) -> ParsedReasoning:
        """Return the reasoning of an answer, opened by the prompt or by its first token; a tool call ends it too."""
        if self._think is None or self._think_end is None:
            return ParsedReasoning(None, 0, True)
        boundaries = (self._think, self._think_end, self._start)
        opened = next((id for id in reversed(prompt) if id in boundaries), None) == self._think
        start = 0
        if not opened:
            start = ids.index(self._think) + 1 if self._think in ids else 0
            if not start or self._tokenizer.decode(ids[: start - 1]).strip():
                return ParsedReasoning(None, 0, True)
        for ending in (self._think_end, self._call):
            if ending in ids[start:]:
                at = ids.index(ending, start)
                text = self._tokenizer.decode(ids[start:at]).removeprefix("\n").removesuffix("\n")
                return ParsedReasoning(text, at + (ending == self._think_end), True)
        return ParsedReasoning(self._tokenizer.decode(ids[start:]).removeprefix("\n"), len(ids), False)

    def _calls(self, ids: Sequence[int], start: int) -> tuple[list[str], list[ParsedToolCall]]:
        """Split an answer at its tool-call tokens into the texts around the calls and the calls."""
        texts: list[str] = []
        calls: list[ParsedToolCall] = []
        while self._call in ids[start:]:
            at = ids.index(self._call, start)
            texts.append(self._tokenizer.decode(ids[start:at]))
            end = ids.index(self._call_end, at) if self._call_end in ids[at:] else None
            start = len(ids) if end is None else end + 1
            call = _read_call(self._tokenizer.decode(ids[at + 1 : end]), closed=end is not None)
            call.raw, call.token_span = self._tokenizer.decode(ids[at:start]), (at, start)
            calls.append(call)
        return [*texts, self._tokenizer.decode(ids[start:])], calls

    def _calls_in_text(self, ids: Sequence[int]) -> tuple[list[str], list[ParsedToolCall]]:
        """Split the text of a model without tool-call tokens, whose tokens may cross the ends of a call."""
        text = self._tokenizer.decode(ids)
        texts: list[str] = []
        calls: list[ParsedToolCall] = []
        end = 0
        for found in _CALL.finditer(text):
            texts.append(text[end : found.start()])
            call = _read_call(found[1], closed=bool(found[2]))
            call.raw = found[0]
            calls.append(call)
            end = found.end()
        return [*texts, text[end:]], calls


def _read_call(text: str, closed: bool) -> ParsedToolCall:
    status = ToolCallStatus
    if not closed:
        return ParsedToolCall(text, status=status.UNCLOSED_BLOCK)
    try:
        call = json.loads(text)
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()  # Python accepts more than JSON allows
    except (ValueError, RecursionError):
        return ParsedToolCall(text, status=status.INVALID_JSON)
    if not isinstance(call, dict):
        return ParsedToolCall(text, status=status.MALFORMED_STRUCTURE)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ParsedToolCall(text, arguments=arguments, status=status.MISSING_NAME)
    if not isinstance(arguments_of({"arguments": arguments}), dict):
        return ParsedToolCall(text, name, arguments, status=status.MALFORMED_STRUCTURE)
    return ParsedToolCall(text, name, arguments)


def arguments_of(function: Mapping[str, Any]) -> Any:
    """Return a call's arguments as an object. Clients send them as JSON text; templates need the object."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    return {} if arguments is None else arguments
