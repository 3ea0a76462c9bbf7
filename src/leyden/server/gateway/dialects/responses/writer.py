"""Writes the answer to a request to /v1/responses, whole or as numbered events."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from leyden.server.gateway.dialects.base import AnswerWriter
from leyden.server.gateway.dialects.encoding import sse_event
from leyden.server.gateway.dialects.responses.objects import ResponseHead, Status
from leyden.server.gateway.dialects.responses.output import ResponseOutput, WireEvent
from leyden.server.gateway.dialects.responses.request import ENCRYPTED_REASONING, ResponseParameters
from leyden.server.gateway.dialects.responses.tools import GivenTool
from leyden.server.gateway.dialects.types import AnswerEvent, AnswerFinished
from leyden.server.gateway.errors import ErrorKind, GatewayError


def new_output(call: str, request: ResponseParameters, given: dict[str, GivenTool]) -> ResponseOutput:
    """Return the empty output of a request."""
    encrypted = ENCRYPTED_REASONING in (request.include or ())
    return ResponseOutput(call, given, summary=request.summarises_reasoning, encrypted=encrypted)


class ResponseWriter(AnswerWriter):
    """Writes one response. It numbers the events of a stream from 0."""

    def __init__(self, call: str, request: ResponseParameters, given: dict[str, GivenTool]) -> None:
        self._head = ResponseHead(call, time.time(), request)
        self._output = new_output(call, request, given)
        self._sent = 0

    def whole(self, events: Sequence[AnswerEvent]) -> bytes:
        """Write a `response` object."""
        finished: AnswerFinished | None = None
        for event in events:
            for _ in self._output.feed(event):
                pass
            finished = event if isinstance(event, AnswerFinished) else finished
        assert finished is not None
        return msgspec.json.encode(self._finished(finished))

    def stream_start(self) -> bytes:
        """Announce the response."""
        response = self._head.write("in_progress", [])
        return self._events([("created", {"response": response}), ("in_progress", {"response": response})])

    def stream_event(self, event: AnswerEvent) -> bytes:
        """Write the events of items and parts, and the whole response at the end."""
        written = self._events(self._output.feed(event))
        if isinstance(event, AnswerFinished):
            response = self._finished(event)
            written += self._events([(response["status"], {"response": response})])
        return written

    def stream_error(self, error: GatewayError) -> bytes:
        """Write the response as failed, with the items so far."""
        closing = self._events(self._output.close("incomplete"))
        code = "rate_limit_exceeded" if error.kind is ErrorKind.RATE_LIMITED else "server_error"
        response = self._head.write("failed", self._output.items, error={"code": code, "message": error.message})
        return closing + self._events([("failed", {"response": response})])

    def _finished(self, finished: AnswerFinished) -> dict[str, Any]:
        status: Status = "incomplete" if finished.finish == "length" else "completed"
        return self._head.write(status, self._output.items, finished=finished, completed=time.time())

    def _events(self, events: Iterable[WireEvent]) -> bytes:
        written = b""
        for name, fields in events:
            kind = f"response.{name}"
            data = msgspec.json.encode({"type": kind, "sequence_number": self._sent, **fields})
            written += sse_event(data, kind)
            self._sent += 1
        return written
