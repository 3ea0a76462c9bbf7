"""Writes the answer to a request to /v1/messages, whole or as events, and the errors of Anthropic's API."""

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from leyden.server.gateway.dialects.base import AnswerWriter
from leyden.server.gateway.dialects.encoding import sse_event
from leyden.server.gateway.dialects.tool_input import ToolInput, input_of
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    AnswerStarted,
    GenerationRequest,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from leyden.server.gateway.errors import STATUS, ErrorKind, GatewayError

_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class MessagesWriter(AnswerWriter):
    """Writes a message, whole or as events. The content is a list of blocks; one block at a time is open.

    As in Anthropic's service, thinking is shown only if the request asks for it.
    """

    def __init__(self, request: GenerationRequest, shows_thinking: bool, started: AnswerStarted) -> None:
        self._request, self._started = request, started
        self._shown = (TextDelta, ReasoningDelta) if shows_thinking else (TextDelta,)
        self._index = -1
        self._open = ""
        """The type of the open block; empty before the first one."""
        self._calls: list[tuple[int, ToolInput]] = []
        """The block of each tool call, and its input."""

    def whole(self, events: Sequence[AnswerEvent]) -> bytes:
        """Write a `message` object."""
        blocks: list[dict[str, Any]] = []
        finished: AnswerFinished | None = None
        for event in events:
            match event:
                case TextDelta(_, text) | ReasoningDelta(_, text) if text and isinstance(event, self._shown):
                    kind = _block_type(event)
                    if not blocks or blocks[-1]["type"] != kind:
                        signed = {"signature": self._signature} if kind == "thinking" else {}
                        blocks.append({**_BLOCKS[kind], **signed})
                    blocks[-1][kind] += text
                case ToolCallFinished(_, _, call):
                    blocks.append({**_tool_use(call.id, call.name), "input": input_of(call)})
                case AnswerFinished():
                    finished = event
        return msgspec.json.encode(self._message(blocks, finished))

    def stream_start(self) -> bytes:
        """Write the empty message."""
        return _event("message_start", message=self._message([], None)) + _event("ping")

    def stream_event(self, event: AnswerEvent) -> bytes:
        """Write a delta of the open block; open and close blocks when the type changes."""
        match event:
            case TextDelta(_, text) | ReasoningDelta(_, text) if text and isinstance(event, self._shown):
                kind = _block_type(event)
                opening = self._open_block(kind, _BLOCKS[kind]) if self._open != kind else b""
                return opening + self._delta(f"{kind}_delta", kind, text)
            case ToolCallStarted(_, _, id, name):
                opening = self._open_block("tool_use", _tool_use(id, name))
                self._calls.append((self._index, ToolInput()))
                return opening
            case ToolArgumentsDelta(_, index, text):
                return self._input_delta(index, self._calls[index][1].feed(text))
            case ToolCallFinished(_, index):
                return self._input_delta(index, self._calls[index][1].finish())
            case AnswerFinished():
                ending = _event("message_delta", delta=_stop_reason(event), usage=_usage(event))
                return self._close_block() + ending + _event("message_stop")
        return b""

    def stream_error(self, error: GatewayError) -> bytes:
        """Write the error as the last event."""
        return sse_event(anthropic_error(error), "error")

    @property
    def _signature(self) -> str:
        """Signs thinking. Clients keep only signed blocks; nothing is checked when they come back."""
        return base64.b64encode(self._started.id.encode()).decode()

    def _message(self, content: list[dict[str, Any]], finished: AnswerFinished | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._started.id}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            **_stop_reason(finished),
            "usage": _usage(finished or self._started),
        }

    def _open_block(self, kind: str, block: dict[str, Any]) -> bytes:
        closing = self._close_block()
        self._index, self._open = self._index + 1, kind
        return closing + _event("content_block_start", index=self._index, content_block=block)

    def _close_block(self) -> bytes:
        if not self._open:
            return b""
        signature = self._delta("signature_delta", "signature", self._signature) if self._open == "thinking" else b""
        return signature + _event("content_block_stop", index=self._index)

    def _input_delta(self, call: int, text: str) -> bytes:
        delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=self._calls[call][0], delta=delta) if text else b""

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, field: text})


def _block_type(event: TextDelta | ReasoningDelta) -> Literal["text", "thinking"]:
    return "text" if isinstance(event, TextDelta) else "thinking"


def _tool_use(id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": {}}


def _stop_reason(finished: AnswerFinished | None) -> dict[str, str | None]:
    if finished is None:
        return {"stop_reason": None, "stop_sequence": None}
    reasons = {
        "tool_calls": "tool_use",
        "length": "max_tokens",
        "stop": "stop_sequence" if finished.stop else "end_turn",
    }
    return {"stop_reason": reasons[finished.finish], "stop_sequence": finished.stop}


def _usage(at: AnswerStarted | AnswerFinished) -> dict[str, int]:
    """Count the tokens so far; unlike OpenAI's, `input_tokens` leaves out the cached ones."""
    return {
        "input_tokens": at.prompt_tokens - at.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": at.cached_tokens,
        "output_tokens": at.completion_tokens if isinstance(at, AnswerFinished) else 0,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event(msgspec.json.encode({"type": kind, **fields}), kind)


def anthropic_error(error: GatewayError) -> bytes:
    """Write an error response. The format has no field for the parameter: the message names it.

    A client that sent `thread` gets the code that makes its SDK continue without threads.
    """
    kind = _ERROR_TYPES.get(STATUS[error.kind], "overloaded_error" if error.retry_after else "api_error")
    too_long = error.kind is ErrorKind.TOO_LONG  # agents look for these words
    message = f"prompt is too long: {error.message}" if too_long else error.text
    body: dict[str, Any] = {"type": kind, "message": message}
    if error.param == "thread":
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
    return msgspec.json.encode({"type": "error", "error": body})
