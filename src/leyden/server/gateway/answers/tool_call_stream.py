"""Streams the tool calls of one answer: a call begins as soon as its name is known, and its arguments follow.

Text that was sent is never changed. So a call counts as soon as its name and the beginning of its arguments can be
read, in an answer that is not streamed too. If it turns out malformed, it is marked so. Any other malformed call is
text, and so is a call that the request does not allow.

Calls are read while they are written if they are `{"name": ..., "arguments": {...}}`, as of most models; one in
another format when it is complete, by the model's renderer.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from leyden.rendering.renderer import ParsedToolCall, ToolCallStatus
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallFinished,
    ToolCallStarted,
)

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


class _SentCall:
    """A call whose beginning was sent."""

    def __init__(self, index: int, name: str, id: str) -> None:
        self.index, self.name, self.id = index, name, id
        self.arguments = ""
        self.finished: ToolCall | None = None


class ToolCallStream:
    """The tool calls of one answer, as far as they were sent."""

    def __init__(self, choice: int, may_call: Callable[[str], bool], ids: Iterable[str] = ()) -> None:
        """`ids` are those of the first calls, if they were made before."""
        self._choice, self._may_call, self._ids = choice, may_call, iter(ids)
        self._sent: dict[int, _SentCall] = {}  # by the position in the answer, where malformed calls count too

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that are finished."""
        return tuple(call.finished for call in self._sent.values() if call.finished is not None)

    def is_open(self, position: int) -> bool:
        """Whether the call at this position of the answer was begun and is not finished."""
        return position in self._sent and self._sent[position].finished is None

    def advance(self, parsed: Sequence[ParsedToolCall]) -> tuple[list[AnswerEvent], list[AnswerEvent]]:
        """Send what is new in the calls of a longer answer; return the events of known calls and those of new ones."""
        known = [event for position, call in enumerate(parsed) for event in self._extend(position, call)]
        new = []
        for position, call in enumerate(parsed):
            if position not in self._sent:
                new += self._announce(position, call)
        return known, new

    def finish(
        self, parsed: Sequence[ParsedToolCall], only_sent: bool = False
    ) -> tuple[list[AnswerEvent], list[AnswerEvent], list[ParsedToolCall]]:
        """Finish the calls of a complete answer; also return those that are text."""
        known = [event for position, call in enumerate(parsed) for event in self._extend(position, call)]
        for position, sent in self._sent.items():
            if sent.finished is None:
                known.append(self._finish(sent, _malformed(sent, parsed[position : position + 1])))
        new: list[AnswerEvent] = []
        unsent: list[ParsedToolCall] = []
        for position, call in enumerate(parsed if not only_sent else ()):
            if position in self._sent:
                continue
            announced = self._announce(position, call)
            if not announced:
                unsent.append(call)
            elif self.is_open(position):
                sent = self._sent[position]
                announced.append(self._finish(sent, _malformed(sent, [call])))
            new += announced
        return known, new, unsent

    def _announce(self, position: int, call: ParsedToolCall) -> list[AnswerEvent]:
        text = _text_of(call)
        if text is None or not self._may_call(text.name):
            return []
        sent = self._sent[position] = _SentCall(len(self._sent), text.name, self._next_id())
        started = ToolCallStarted(self._choice, sent.index, sent.id, sent.name)
        return [started, *self._extend(position, call)]

    def _next_id(self) -> str:
        return next(self._ids, None) or f"call_{secrets.token_hex(12)}"

    def _extend(self, position: int, call: ParsedToolCall) -> list[AnswerEvent]:
        """Send the new part of a call's arguments, and its end if it is complete."""
        sent, text = self._sent.get(position), _text_of(call)
        if sent is None or sent.finished is not None or text is None:
            return []
        events: list[AnswerEvent] = []
        if text.name == sent.name and text.arguments.startswith(sent.arguments):
            new, sent.arguments = text.arguments[len(sent.arguments) :], text.arguments
            if new:
                events.append(ToolArgumentsDelta(self._choice, sent.index, new))
        if call.status == ToolCallStatus.OK:
            events.append(self._finish(sent, _malformed(sent, [call])))
        return events

    def _finish(self, sent: _SentCall, malformed: str | None) -> ToolCallFinished:
        sent.finished = ToolCall(sent.id, sent.name, sent.arguments, malformed)
        return ToolCallFinished(self._choice, sent.index, sent.finished)


def _malformed(sent: _SentCall, parsed: Sequence[ParsedToolCall]) -> str | None:
    """Return why the call as it was sent is not the one that the complete answer has; None if it is."""
    if not parsed:
        return "not_in_answer"
    (call,) = parsed
    if call.status != ToolCallStatus.OK:
        return str(call.status.value)
    same = call.name == sent.name and _decoded(sent.arguments) == _decoded(_encoded(call.arguments))
    return None if same else "repeated_key"


def _text_of(call: ParsedToolCall) -> CallText | None:
    """Return the call as the model writes it; None if it cannot be read yet."""
    text = read_call_text(call.raw)
    if text is None and call.status == ToolCallStatus.OK and call.name is not None:
        return CallText(call.name, _encoded(call.arguments), True)
    return text


def _encoded(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()


def _decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def read_call_text(text: str) -> CallText | None:
    """Read a call; None if its name is not complete, or if it is in another format."""
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
