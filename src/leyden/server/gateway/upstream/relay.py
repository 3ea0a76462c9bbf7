"""A call to a model that is served elsewhere: passed on, passed back as it comes, and recorded without tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec

from leyden.records import Call, CallStatus
from leyden.server.gateway.caller import Caller
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    AnswerStarted,
    FinishReason,
    GenerationRequest,
    Message,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
)
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prefix_index import History
from leyden.server.gateway.recorder import AttemptCalls, Recorder
from leyden.server.gateway.upstream.client import UpstreamClient

UPSTREAM = "upstream"
"""The policy under which such calls are recorded, and the route that leads here."""

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


class Relay:
    """The answers to one ask (`n` of them) on their way from the upstream into the record."""

    def __init__(
        self, recorder: Recorder, ledger: AttemptCalls, caller: Caller, ask: GenerationRequest, first: str
    ) -> None:
        self._recorder, self._ledger, self._caller = recorder, ledger, caller
        self._ask, self._first = ask, first
        self._began = time.time()
        self._answers = [_RelayedAnswer(choice) for choice in range(ask.n)]
        self._usage: dict[str, Any] = {}
        self._history = History.of(ask.messages, ask.tools, UPSTREAM)
        self._place = ledger.conversation.place(self._history)
        self._saving: asyncio.Task[None] | None = None

    async def pass_on(self, upstream: UpstreamClient) -> AsyncGenerator[AnswerEvent, None]:
        """Pass the ask on, and the answers back; each is recorded before it is said to be done."""
        try:
            async with upstream.ask(self._ask) as chunks:
                yield AnswerStarted(self._first)
                async for chunk in chunks:
                    for event in self._take(chunk):
                        yield event
            for answer in self._answers:
                for event in answer.end():
                    yield event
            self._saving = asyncio.create_task(self._record(CallStatus.OK))
            await asyncio.shield(self._saving)
        except (GeneratorExit, asyncio.CancelledError):
            if self._saving is None:  # the caller went away before the answer was whole
                with suppress(GatewayError):  # its attempt may be over, too
                    await asyncio.shield(asyncio.create_task(self._record(CallStatus.ABANDONED)))
            raise
        except GatewayError:
            if self._saving is None:
                await self._record(CallStatus.FAILED)
            raise
        details = self._usage.get("prompt_tokens_details") or {}
        for answer in self._answers:
            yield AnswerFinished(
                choice=answer.choice,
                id=self._id(answer.choice),
                finish=_FINISHES.get(answer.finish or "", "stop"),
                stop=None,
                prompt_tokens=self._usage.get("prompt_tokens") or 0,
                completion_tokens=(self._usage.get("completion_tokens") or 0) if answer.choice == 0 else 0,
                cached_tokens=details.get("cached_tokens") or 0,
            )

    def _take(self, chunk: dict[str, Any]) -> list[AnswerEvent]:
        self._usage = chunk.get("usage") or self._usage
        events: list[AnswerEvent] = []
        try:
            for at, choice in enumerate(chunk.get("choices") or ()):
                events += self._answers[choice.get("index", at)].take(choice)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise GatewayError(ErrorKind.FAILED, f"the upstream did not answer with a completion: {error!r}") from error
        return events

    async def _record(self, status: CallStatus) -> None:
        calls = [self._call(answer, status) for answer in self._answers]
        await self._recorder.record(self._ledger, calls, self._history)

    def _id(self, choice: int) -> str:
        return f"{self._first}-{choice}" if choice else self._first

    def _call(self, answer: "_RelayedAnswer", status: CallStatus) -> Call:
        place, ask = self._place, self._ask
        parent = place.turn.call if place.turn is not None else None
        shared = place.shared if parent is not None else 0
        retry = self._caller.retry and self._ledger.conversation.retried(self._history)
        own: dict[str, Any] = {
            "parent": parent,
            "kept_messages": shared,
            "messages": ask.messages[shared:],
            "tools": ask.tools if parent is None else None,
            "retry_of": retry or None,
            "request": ask.request,
        }
        if answer.choice:
            own = {"parent": self._first, "kept_messages": len(ask.messages)}
        return Call(
            id=self._id(answer.choice),
            choice=answer.choice,
            policy=UPSTREAM,
            role=self._caller.role,
            span=self._caller.span,
            made=place.made,
            made_why=place.why,
            status=status,
            finish=answer.finish or "stop" if status is CallStatus.OK else str(status),
            sampling=ask.sampling,
            response=answer.message,
            started=self._began,
            ended=time.time(),
            **own,
        )


class _RelayedAnswer:
    """One answer, put together from what comes of it; a whole one is all that comes."""

    def __init__(self, choice: int) -> None:
        self.choice = choice
        self.finish: str | None = None
        self._content = self._reasoning = ""
        self._calls: list[dict[str, str]] = []

    def take(self, choice: dict[str, Any]) -> list[AnswerEvent]:
        """Take up more; what can be shown of it now."""
        whole = choice.get("message")
        more = whole or choice.get("delta") or {}
        self.finish = choice.get("finish_reason") or self.finish or ("stop" if whole else None)
        events: list[AnswerEvent] = []
        if reasoning := more.get("reasoning_content") or more.get("reasoning"):
            self._reasoning += reasoning
            events.append(ReasoningDelta(self.choice, reasoning))
        content = more.get("content") or more.get("refusal") or ""
        tokens = tuple(map(_token, (choice.get("logprobs") or {}).get("content") or ()))
        if content or tokens:
            self._content += content
            events.append(TextDelta(self.choice, content, tokens))
        for at, call in enumerate(more.get("tool_calls") or ()):
            index = call.get("index", at)
            while len(self._calls) <= min(index, 1000):
                self._calls.append({"id": "", "name": "", "arguments": ""})
            known, function = self._calls[index], call.get("function") or {}
            known["id"] = call.get("id") or known["id"]
            known["name"] = function.get("name") or known["name"]
            arguments = function.get("arguments") or ""
            known["arguments"] += arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        return events

    def end(self) -> list[AnswerEvent]:
        """What can be shown only when all has come: tool calls, whole."""
        if self.finish is None:
            raise GatewayError(ErrorKind.FAILED, "the upstream broke off before its answer was whole")
        return [
            ToolCallDelta(self.choice, index, ToolCall(call["id"], call["name"], call["arguments"] or "{}"))
            for index, call in enumerate(self._calls)
        ]

    @property
    def message(self) -> Message | None:
        """The answer as a message; None where nothing came."""
        if not (self._content or self._reasoning or self._calls or self.finish):
            return None
        message: Message = {"role": "assistant", "content": self._content}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"] or "{}"},
                }
                for call in self._calls
            ]
        return message


def _token(given: dict[str, Any]) -> TokenInfo:
    top = tuple((other["token"], _bytes(other), other["logprob"]) for other in given.get("top_logprobs") or ())
    return TokenInfo(given["token"], _bytes(given), given["logprob"], top)


def _bytes(given: dict[str, Any]) -> bytes:
    written = given.get("bytes")
    return str(given["token"]).encode() if written is None else bytes(written)
