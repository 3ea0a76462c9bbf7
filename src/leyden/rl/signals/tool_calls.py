"""The tool calls of an episode, each with the model call that made it and the result that a later one shows."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from leyden.episodes import Episode
from leyden.records import Call, CallStatus

_canonical = msgspec.json.Encoder(order="deterministic").encode


class ObservedToolCall(Struct, frozen=True):
    """A tool that an answer calls."""

    call: Call
    place: int
    """Where in the answer it stands, from 1."""
    id: str
    name: str
    arguments: dict[str, Any] | str
    """An object, or the text that is none."""

    @property
    def key(self) -> tuple[str, bytes]:
        """Equal for equal calls."""
        return key_of(self.name, self.arguments)


class ToolResult(Struct, frozen=True):
    """What became of a tool call, as a later request tells the model."""

    text: str
    error: bool
    """Whether the agent marked it as an error."""


def key_of(name: str, arguments: dict[str, Any] | str) -> tuple[str, bytes]:
    """What tells calls apart: the tool, and arguments that mean the same however they are written."""
    return name, _canonical(arguments)


def answers(episode: Episode) -> Iterator[tuple[Call, dict[str, Any]]]:
    """The calls that came to their end, with their answers; an agent never saw the others."""
    for call in episode.calls:
        if call.status is CallStatus.OK and isinstance(call.response, dict):
            yield call, call.response


def tool_calls_of(call: Call, message: Any) -> list[ObservedToolCall]:
    """The tool calls in an assistant's message."""
    asked = message.get("tool_calls") if isinstance(message, dict) else None
    found = []
    for place, one in enumerate(asked if isinstance(asked, list | tuple) else (), 1):
        match one:
            case {"id": str(id), "function": {"name": str(name), "arguments": str() | dict() as arguments}}:
                found.append(ObservedToolCall(call, place, id, name, _read(arguments)))
    return found


def results(episode: Episode, asked: Sequence[ObservedToolCall]) -> dict[int, ToolResult]:
    """The result of each tool call that has one, by its index; of several that are shown the first is the true one.

    Ids that models served elsewhere give need not be unique: where several calls made one, it is that of an ancestor.
    """
    makers: dict[str, list[int]] = {}
    for index, made in enumerate(asked):
        makers.setdefault(made.id, []).append(index)
    by_id = {call.id: call for call in episode.calls}
    found: dict[int, ToolResult] = {}
    for call in episode.calls:
        for message in call.messages:
            match message:
                case {"role": "tool", "tool_call_id": str(id), "content": str(text)} if id in makers:
                    candidates = makers[id]
                    if len(candidates) > 1:
                        before = _ancestors(call, by_id)
                        candidates = [index for index in candidates if asked[index].call.id in before][-1:]
                    for index in candidates:
                        found.setdefault(index, ToolResult(text, message.get("is_error") is True))
    return found


def _ancestors(call: Call, by_id: dict[str, Call]) -> set[str]:
    found = set[str]()
    while call.parent is not None:
        call = by_id[call.parent]
        found.add(call.id)
    return found


def _read(arguments: str | dict[str, Any]) -> dict[str, Any] | str:
    if isinstance(arguments, dict):
        return arguments
    try:
        read = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments
