"""Writes the answer to a request to generateContent, whole or as chunks of a stream, and the errors of Google's API."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from leyden.server.gateway.dialects.base import AnswerWriter
from leyden.server.gateway.dialects.encoding import sse_event
from leyden.server.gateway.dialects.tool_input import input_of
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    AnswerStarted,
    GenerationRequest,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    ToolCallFinished,
)
from leyden.server.gateway.errors import STATUS, GatewayError

_STATUS_NAMES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


class GoogleWriter(AnswerWriter):
    """Writes candidates. Function calls are written when they are complete, as in Google's service."""

    def __init__(self, request: GenerationRequest, shows_thoughts: bool, started: AnswerStarted) -> None:
        self._request, self._shows_thoughts, self._id = request, shows_thoughts, started.id
        self._unsigned: set[int] = set()
        """The choices that have reasoned, and whose thoughts no function call has signed."""
        self._finished: list[AnswerFinished] = []

    def whole(self, events: Sequence[AnswerEvent]) -> bytes:
        """Write all candidates."""
        candidates = [_candidate(choice, []) for choice in range(self._request.n)]
        tokens: list[list[TokenInfo]] = [[] for _ in candidates]
        for event in events:
            if isinstance(event, AnswerFinished):
                self._finished.append(event)
                candidates[event.choice]["finishReason"] = _finish_reason(event)
            elif (part := self._part(event)) is not None:
                choice, made = part
                parts = candidates[choice]["content"]["parts"]
                if parts and "text" in made and parts[-1].keys() == made.keys():
                    parts[-1]["text"] += made["text"]
                elif made.get("text") != "":
                    parts.append(made)
                tokens[choice] += event.tokens if isinstance(event, TextDelta) else ()
        for candidate, sampled in zip(candidates, tokens, strict=True):
            candidate |= self._logprobs(sampled)
        return self._response(candidates)

    def stream_event(self, event: AnswerEvent) -> bytes:
        """Write a chunk with one part; the last of a candidate has no text, the reason of its end and the usage."""
        if isinstance(event, AnswerFinished):
            self._finished.append(event)
            ended = _candidate(event.choice, [{"text": ""}]) | {"finishReason": _finish_reason(event)}
            return sse_event(self._response([ended]))
        if (part := self._part(event)) is None:
            return b""
        logprobs = self._logprobs(event.tokens) if isinstance(event, TextDelta) else {}
        if part[1].get("text") == "" and not logprobs:
            return b""
        return sse_event(self._response([_candidate(part[0], [part[1]]) | logprobs]))

    def stream_error(self, error: GatewayError) -> bytes:
        """Write the error as the last event."""
        return sse_event(google_error(error))

    def _part(self, event: AnswerEvent) -> tuple[int, dict[str, Any]] | None:
        """Return the part that an event adds, with its choice."""
        match event:
            case TextDelta(choice, text):
                return choice, {"text": text}
            case ReasoningDelta(choice, text):
                self._unsigned.add(choice)
                return (choice, {"text": text, "thought": True}) if self._shows_thoughts else None
            case ToolCallFinished(choice, _, call):
                signature = {}
                if choice in self._unsigned:  # some clients expect it; nothing is checked when it comes back
                    self._unsigned.remove(choice)
                    signature = {"thoughtSignature": base64.b64encode(self._id.encode()).decode()}
                called = {"id": call.id, "name": call.name, "args": input_of(call)}
                return choice, {"functionCall": called, **signature}
        return None

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        if self._request.top_logprobs is None or not tokens:
            return {}
        chosen = [{"token": token.text, "tokenId": token.id, "logProbability": token.logprob} for token in tokens]
        top = [
            {"candidates": [{"token": text, "logProbability": logprob} for text, _, logprob in token.top]}
            for token in tokens
        ]
        return {"logprobsResult": {"chosenCandidates": chosen, "topCandidates": top}}

    def _response(self, candidates: list[dict[str, Any]]) -> bytes:
        usage = {"usageMetadata": _usage(self._finished)} if self._finished else {}
        about = {"modelVersion": self._request.model, "responseId": self._id}
        return msgspec.json.encode({"candidates": candidates, **usage, **about})


def _candidate(choice: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"index": choice, "content": {"role": "model", "parts": parts}}


def _finish_reason(finished: AnswerFinished) -> str:
    return "MAX_TOKENS" if finished.finish == "length" else "STOP"


def _usage(finished: Sequence[AnswerFinished]) -> dict[str, int]:
    """Sum up the candidates, which share their prompt; their count leaves out the thoughts."""
    prompt, sampled = max(f.prompt_tokens for f in finished), sum(f.completion_tokens for f in finished)
    thoughts = sum(f.reasoning_tokens for f in finished)
    return {
        "promptTokenCount": prompt,
        "cachedContentTokenCount": max(f.cached_tokens for f in finished),
        "candidatesTokenCount": sampled - thoughts,
        "thoughtsTokenCount": thoughts,
        "totalTokenCount": prompt + sampled,
    }


def google_error(error: GatewayError) -> bytes:
    """Write an error response. The format has no field for the parameter: the message names it."""
    code = STATUS[error.kind]
    body: dict[str, Any] = {"code": code, "message": error.text, "status": _STATUS_NAMES[code]}
    if error.retry_after is not None:
        retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{error.retry_after:g}s"}
        body["details"] = [retry]
    return msgspec.json.encode({"error": body})
