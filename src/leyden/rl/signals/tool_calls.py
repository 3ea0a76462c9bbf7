"""Reads the tool calls of an episode and the results that later prompts show."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from leyden.decoding import decode_object
from leyden.episodes import Episode
from leyden.records import Call, CallStatus

_canonical = msgspec.json.Encoder(order="deterministic").encode


class ObservedToolCall(Struct, frozen=True):
    """A tool call in an answer."""

    call: Call
    position: int
    """Number in the answer, from 1."""
    id: str
    name: str
    arguments: dict[str, Any] | str
    """A JSON object; the text if it is not one."""
    malformed: str | None = None
    """Why the gateway could not parse the call after it had streamed its beginning; None if it could."""

    @property
    def key(self) -> tuple[str, bytes]:
        """Equal for calls of the same tool with the same arguments."""
        return key_of(self.name, self.arguments)


class ToolResult(Struct, frozen=True):
    """The result of a tool call, as a later prompt shows it to the model."""

    text: str
    error: bool
    """Whether the agent marked it as an error."""


def key_of(name: str, arguments: dict[str, Any] | str) -> tuple[str, bytes]:
    """Return a key of tool and arguments that does not depend on how the JSON is formatted."""
    return name, _canonical(arguments)


def answers(episode: Episode) -> Iterator[tuple[Call, dict[str, Any]]]:
    """Yield the completed calls with their answers; an agent never received those of other calls.

    A call for the logprobs of its prompt, which samples nothing, has no answer.
    """
    for call in episode.calls:
        if call.status is CallStatus.OK and isinstance(call.response, dict) and call.sampling.max_tokens != 0:
            yield call, call.response


def tool_calls_of(call: Call, message: Any) -> list[ObservedToolCall]:
    """Return the tool calls in an assistant's message."""
    listed = message.get("tool_calls") if isinstance(message, dict) else None
    found = []
    for position, item in enumerate(listed if isinstance(listed, list | tuple) else (), 1):
        match item:
            case {"id": str(id), "function": {"name": str(name), "arguments": str() | dict() as arguments}}:
                malformed = item.get("malformed")
                found.append(ObservedToolCall(call, position, id, name, _parse(arguments), malformed))
    return found


def results(episode: Episode, tool_calls: Sequence[ObservedToolCall]) -> dict[int, ToolResult]:
    """Return the results of tool calls by index. If several prompts show a result, the first one counts.

    Upstream models may reuse ids of tool calls; a result then belongs to the tool call of an ancestor.
    """
    indices_by_id: dict[str, list[int]] = {}
    for index, tool_call in enumerate(tool_calls):
        indices_by_id.setdefault(tool_call.id, []).append(index)
    calls_by_id = {call.id: call for call in episode.calls}
    found: dict[int, ToolResult] = {}
    for call in episode.calls:
        for message in call.messages:
            match message:
                case {"role": "tool", "tool_call_id": str(id), "content": str(text)} if id in indices_by_id:
                    candidates = indices_by_id[id]
                    if len(candidates) > 1:
                        ancestors = _ancestors(call, calls_by_id)
                        candidates = [index for index in candidates if tool_calls[index].call.id in ancestors][-1:]
                    for index in candidates:
                        found.setdefault(index, ToolResult(text, message.get("is_error") is True))
    return found


def _ancestors(call: Call, calls_by_id: dict[str, Call]) -> set[str]:
    found = set[str]()
    while call.parent is not None:
        call = calls_by_id[call.parent]
        found.add(call.id)
    return found


def _parse(arguments: str | dict[str, Any]) -> dict[str, Any] | str:
    parsed = None if isinstance(arguments, dict) else decode_object(arguments)
    return arguments if parsed is None else parsed
