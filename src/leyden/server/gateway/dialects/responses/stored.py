"""Stored responses. The record of a call is all that is stored of one, so they survive a restart of the server."""

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from leyden.records import CallStatus
from leyden.server.gateway.dialects.base import ModelAccess, StoredAnswer
from leyden.server.gateway.dialects.responses.ids import call_of_input, call_of_item, call_of_response, input_id
from leyden.server.gateway.dialects.responses.objects import ResponseHead, Status
from leyden.server.gateway.dialects.responses.output import ResponseOutput
from leyden.server.gateway.dialects.responses.request import ENCRYPTED_REASONING, ResponseParameters
from leyden.server.gateway.dialects.responses.tools import GivenTool, ToolTable, is_left_out
from leyden.server.gateway.dialects.responses.writer import new_output
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallFinished,
    ToolCallStarted,
)
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prompts.history import meanings

_KEPT = "responses"
"""The field of a recorded request that says how it becomes a response again."""
_MAX_REFERENCED = 32 << 20
"""Bytes of the items that a request refers to, each counted as often as it is: a reference is much smaller."""


def recorded_request(document: dict[str, Any], given: dict[str, GivenTool]) -> dict[str, Any]:
    """Return what the record keeps of a request beside its messages and tools."""
    others = {name: value for name, value in document.items() if name not in ("input", "instructions", "tools")}
    kept = {"instructions": bool(document.get("instructions")), "given": msgspec.to_builtins(given)}
    left_out = [tool["type"] for tool in document.get("tools") or () if is_left_out(tool)]
    return {**others, _KEPT: kept | ({"left_out_tools": left_out} if left_out else {})}


class StoredResponse:
    """A response that was stored; it is built again from the record of its call."""

    def __init__(self, answer: StoredAnswer) -> None:
        self._answer, self._call = answer, answer.call
        kept = answer.call.request[_KEPT]
        self._given = msgspec.convert(kept["given"], dict[str, GivenTool])
        self._instructions = bool(kept["instructions"])
        self._request = msgspec.convert(answer.call.request, ResponseParameters)

    @property
    def complete(self) -> bool:
        """Whether it can be continued."""
        return self._call.status is CallStatus.OK

    @property
    def conversation(self) -> list[Message]:
        """The messages so far and the answer, without the instructions, which are given anew with every request."""
        return [*self._messages, self._call.response]

    def document(self, include: Sequence[str] = ()) -> dict[str, Any]:
        """Return the response object."""
        tools = ToolTable(tuple(self._answer.tools), self._given).written()
        instructions = self._answer.messages[0]["content"] if self._instructions else None
        included = [*(self._request.include or ()), *include]
        request = replace(self._request, tools=tools, instructions=instructions, include=included)
        output = new_output(self._call.id, request, self._given)
        finished = AnswerFinished(
            choice=0,
            id=self._call.id,
            finish="length" if self._call.finish == "length" else "stop",
            stop=None,
            prompt_tokens=self._call.kept_ids + len(self._call.prompt_ids),
            completion_tokens=len(self._call.completion_ids),
            cached_tokens=self._call.kept_ids,
            reasoning_tokens=self._answer.reasoning_tokens,
        )
        _feed(output, self._call.response, finished)
        status: Status = "incomplete" if finished.finish == "length" else "completed"
        head = ResponseHead(self._call.id, self._call.started, request)
        if self.complete:
            return head.write(status, output.items, finished=finished, completed=self._call.ended)
        error = {"code": "server_error", "message": f"the call is recorded as {self._call.status}"}
        return head.write("failed", output.items, finished=finished, error=error)

    def input_items(self) -> list[dict[str, Any]]:
        """Return the input items, those of the conversation before included."""
        items: list[dict[str, Any]] = []
        custom: set[str] = set()
        for message in self._messages:
            new = list(self._items(message, custom))
            custom.update(item["call_id"] for item in new if item["type"] == "custom_tool_call")
            items += new
        return [{**item, "id": input_id(self._call.id, index)} for index, item in enumerate(items)]

    @cached_property
    def items(self) -> dict[str, dict[str, Any]]:
        """The input and output items by their ids."""
        items = [*self.input_items(), *self.document((ENCRYPTED_REASONING,))["output"]]
        return {item["id"]: item for item in items}

    @property
    def _messages(self) -> Sequence[Message]:
        return self._answer.messages[1:] if self._instructions else self._answer.messages

    def _items(self, message: Message, custom: Collection[str]) -> Iterator[dict[str, Any]]:
        """Return the items of a message; `custom` are the calls of custom tools before it."""
        match message["role"]:
            case "assistant":
                output = new_output("", self._request, self._given)
                _feed(output, message, None)
                yield from output.items
            case "tool":
                call = message["tool_call_id"]
                kind = "custom_tool_call_output" if call in custom else "function_call_output"
                yield {"type": kind, "status": "completed", "call_id": call, "output": message["content"]}
            case role:
                content = [{"type": "input_text", "text": message["content"]}]
                yield {"type": "message", "status": "completed", "role": role, "content": content}


def _feed(output: ResponseOutput, answer: Message | None, finished: AnswerFinished | None) -> None:
    """Build the items of a recorded answer."""
    events: list[AnswerEvent] = []
    if answer is not None:
        events = [ReasoningDelta(0, answer.get("reasoning_content") or ""), TextDelta(0, answer.get("content") or "")]
        for index, call in enumerate(answer.get("tool_calls") or ()):
            function = call["function"]
            made = ToolCall(call["id"], function["name"], function["arguments"])
            events += [
                ToolCallStarted(0, index, made.id, made.name),
                ToolArgumentsDelta(0, index, made.arguments),
                ToolCallFinished(0, index, made),
            ]
    for event in [*events, finished] if finished is not None else events:
        for _ in output.feed(event):
            pass
    for _ in output.close():
        pass


async def find_response(access: ModelAccess, id: str) -> StoredResponse | None:
    """Return a stored response of the caller's attempt."""
    call = call_of_response(id)
    return await _find(access, call) if call is not None else None


async def resolve_references(items: Sequence[Any], access: ModelAccess) -> list[Any]:
    """Replace each `item_reference` by the item of a stored response that it names."""
    found: dict[str, StoredResponse | None] = {}
    sizes: dict[str, int] = {}
    size, resolved = 0, []
    for index, item in enumerate(items):
        if not _is_reference(item):
            resolved.append(item)
            continue
        call = call_of_item(item["id"]) or call_of_input(item["id"])
        if call is not None and call not in found:
            found[call] = await _find(access, call)
        response = found.get(call or "")
        named = response.items.get(item["id"]) if response is not None else None
        if named is None:
            message = f"no item {item['id']!r} is stored: it may be from a request with store set to false"
            raise GatewayError(ErrorKind.NOT_FOUND, message, f"input[{index}].id")
        if item["id"] not in sizes:
            sizes[item["id"]] = len(msgspec.json.encode(named))
        size += sizes[item["id"]]
        if size > _MAX_REFERENCED:
            message = f"the items that are referred to have more than {_MAX_REFERENCED} bytes"
            raise GatewayError(ErrorKind.TOO_LONG, message, f"input[{index}].id")
        resolved.append(named)
    return resolved


def _is_reference(item: Any) -> bool:
    match item:
        case {"type": "item_reference", "id": str()}:
            return True
        case {"id": str(), **others}:
            return "role" not in others and others.get("type") is None
    return False


async def _find(access: ModelAccess, call: str) -> StoredResponse | None:
    answer = await access.stored_answer(call)
    if answer is None or not isinstance(answer.call.request, dict):
        return None
    if _KEPT not in answer.call.request or answer.call.request.get("store") is False:
        return None
    return StoredResponse(answer)


def without_repeated(stored: Sequence[Message], given: Sequence[Message]) -> Sequence[Message]:
    """Return the messages of a request that are new. `stored` is the conversation so far; its last one is the answer.

    Sent again can be: the end of the conversation or all of it, with or without the answer, and, if the answer calls
    tools, messages before the tools' results. A message that a user repeats on its own is new.
    """
    known, sent = meanings(stored), meanings(given)
    if length := _overlap(known, sent):
        return given[length:]
    if length := _overlap(known[:-1], sent[:-1]):
        return given[length:]
    if not stored[-1].get("tool_calls"):
        return given
    results = next((at for at, message in enumerate(given) if message["role"] == "tool"), 0)
    repeated = set(known)
    return [message for at, message in enumerate(given) if at >= results or sent[at] not in repeated]


def _overlap(known: Sequence[bytes], sent: Sequence[bytes]) -> int:
    """Return how many messages at the end of the first are the beginning of the second (Knuth-Morris-Pratt)."""
    borders: list[int] = []
    """For each beginning of `sent`, how many messages at its end are the beginning of it too."""

    def extended(length: int, message: bytes) -> int:
        """Return how many messages of `sent` end with this message, if so many end before it."""
        while length and (length == len(sent) or sent[length] != message):
            length = borders[length - 1]
        return length + (sent[length] == message)

    for message in sent:
        borders.append(extended(borders[-1], message) if borders else 0)
    length = 0
    for message in known if sent else ():
        length = extended(length, message)
    return length
