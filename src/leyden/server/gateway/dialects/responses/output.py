"""Builds the output items of a response from the events of an answer, with the stream events that announce them.

One item at a time is open. Streams, whole responses and stored responses are all built here, so they are the same.
"""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from leyden.server.gateway.dialects.custom_tools import CustomInput
from leyden.server.gateway.dialects.openai import write_logprob
from leyden.server.gateway.dialects.responses.ids import item_id
from leyden.server.gateway.dialects.responses.items import seal_reasoning
from leyden.server.gateway.dialects.responses.tools import GivenTool
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallFinished,
    ToolCallStarted,
)

WireEvent = tuple[str, dict[str, Any]]
"""The type of a stream event beneath `response.`, and its fields."""


class _TextItem(Struct, frozen=True):
    """How an item that holds one part of text is written, and the events that build it."""

    type: str
    prefix: str
    parts: str
    part: dict[str, Any]
    index: str
    part_event: str
    text_event: str


_MESSAGE = _TextItem(
    "message",
    "msg",
    "content",
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "content_index",
    "content_part",
    "output_text",
)
_REASONING = _TextItem(
    "reasoning",
    "rs",
    "content",
    {"type": "reasoning_text", "text": ""},
    "content_index",
    "content_part",
    "reasoning_text",
)
_SUMMARY = _TextItem(
    "reasoning",
    "rs",
    "summary",
    {"type": "summary_text", "text": ""},
    "summary_index",
    "reasoning_summary_part",
    "reasoning_summary_text",
)


class _CallItem(Struct, frozen=True):
    """How an item that is a tool call is written, and the events that build it."""

    type: str
    prefix: str
    field: str
    event: str


_FUNCTION_CALL = _CallItem("function_call", "fc", "arguments", "function_call_arguments")
_CUSTOM_CALL = _CallItem("custom_tool_call", "ctc", "input", "custom_tool_call_input")


class ResponseOutput:
    """The items of one answer, as far as it has come."""

    def __init__(self, call: str, given: dict[str, GivenTool], *, summary: bool, encrypted: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._call, self._given = call, given
        self._reasoning, self._encrypted = _SUMMARY if summary else _REASONING, encrypted
        self._open: _TextItem | None = None
        """The kind of the last item, while it is open and holds text."""
        self._call_items: dict[int, tuple[_CallItem, int]] = {}
        """For each tool call its kind and the index of its item."""
        self._inputs: dict[int, CustomInput] = {}
        """For each call of a custom tool its input."""

    def feed(self, event: AnswerEvent) -> Iterator[WireEvent]:
        """Add an event of the answer; yield the stream events that follow from it."""
        match event:
            case ReasoningDelta(_, text) if text:
                yield from self._text(self._reasoning, text, ())
            case TextDelta(_, text, tokens) if text or (tokens and self._open is _MESSAGE):
                yield from self._text(_MESSAGE, text, tokens)
            case ToolCallStarted(_, index, id, name):
                yield from self.close()
                yield self._begin_call(index, id, name)
            case ToolArgumentsDelta(_, index, text):
                yield from self._arguments(index, text)
            case ToolCallFinished(_, index, call):
                yield from self._finish_call(index, call)
            case AnswerFinished():
                if not any(item["type"] != "reasoning" for item in self.items):
                    yield from self._begin(_MESSAGE)  # every answer has text or a call
                yield from self.close("incomplete" if event.finish == "length" else "completed")

    def close(self, status: str = "completed") -> Iterator[WireEvent]:
        """Close the open item. A tool call that has begun and is not finished gets the status."""
        for _, at in self._call_items.values():
            if self.items[at]["status"] == "in_progress":
                self.items[at]["status"] = status
        if self._open is None:
            return
        kind, self._open = self._open, None
        item, part = self.items[-1], self.items[-1][kind.parts][-1]
        item["status"] = status
        if item["type"] == "reasoning" and self._encrypted:
            item["encrypted_content"] = seal_reasoning(part["text"])
        logprobs = {"logprobs": part["logprobs"]} if kind is _MESSAGE else {}
        yield f"{kind.text_event}.done", {**self._at(kind), "text": part["text"], **logprobs}
        yield f"{kind.part_event}.done", {**self._at(kind), "part": part}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _text(self, kind: _TextItem, text: str, tokens: tuple[TokenInfo, ...]) -> Iterator[WireEvent]:
        if self._open is not kind:
            yield from self._begin(kind)
        part = self.items[-1][kind.parts][-1]
        part["text"] += text
        logprobs = {}
        if kind is _MESSAGE:
            logprobs["logprobs"] = list(map(write_logprob, tokens))
            part["logprobs"] += logprobs["logprobs"]
        yield f"{kind.text_event}.delta", {**self._at(kind), "delta": text, **logprobs}

    def _begin(self, kind: _TextItem) -> Iterator[WireEvent]:
        yield from self.close()
        fields: dict[str, Any] = {"role": "assistant", "content": []}
        if kind.type == "reasoning":
            fields = {"summary": [], "encrypted_content": None} | ({} if kind.parts == "summary" else {"content": []})
        yield self._add(kind.type, kind.prefix, fields)
        part = {name: list(value) if isinstance(value, list) else value for name, value in kind.part.items()}
        self.items[-1][kind.parts].append(part)
        self._open = kind
        yield f"{kind.part_event}.added", {**self._at(kind), "part": dict(kind.part)}

    def _begin_call(self, index: int, id: str, name: str) -> WireEvent:
        given = self._given.get(name, GivenTool(name))
        namespace = {"namespace": given.namespace} if given.namespace else {}
        kind = _CUSTOM_CALL if given.custom else _FUNCTION_CALL
        self._call_items[index] = kind, len(self.items)
        return self._add(kind.type, kind.prefix, {"call_id": id, "name": given.name, **namespace, kind.field: ""})

    def _arguments(self, index: int, text: str) -> Iterator[WireEvent]:
        """Add to the arguments of a function, or to the input of a custom tool, which is a string in them."""
        if self._call_items[index][0] is _CUSTOM_CALL:
            text = self._inputs.setdefault(index, CustomInput()).feed(text)
        yield from self._extend_call(index, text)

    def _extend_call(self, index: int, text: str) -> Iterator[WireEvent]:
        kind, at = self._call_items[index]
        if text:
            self.items[at][kind.field] += text
            yield f"{kind.event}.delta", {"item_id": self.items[at]["id"], "output_index": at, "delta": text}

    def _finish_call(self, index: int, call: ToolCall) -> Iterator[WireEvent]:
        kind, at = self._call_items[index]
        item = self.items[at]
        if kind is _CUSTOM_CALL:
            yield from self._extend_call(index, self._inputs.setdefault(index, CustomInput()).finish(call))
        yield f"{kind.event}.done", {"item_id": item["id"], "output_index": at, kind.field: item[kind.field]}
        item["status"] = "completed"
        yield "output_item.done", {"output_index": at, "item": item}

    def _add(self, kind: str, prefix: str, fields: dict[str, Any]) -> WireEvent:
        index = sum(item["id"].startswith(f"{prefix}_") for item in self.items)
        id = item_id(prefix, self._call, index)
        self.items.append({"id": id, "type": kind, "status": "in_progress", **fields})
        added = {name: list(value) if isinstance(value, list) else value for name, value in self.items[-1].items()}
        return "output_item.added", {"output_index": len(self.items) - 1, "item": added}

    def _at(self, kind: _TextItem) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, kind.index: 0}
