"""Relays calls to what answers without tokens: streams the answers back as they come and records them."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from leyden.server.gateway.calls.recorder import CallRecording, PreparedCall, RecordedAnswer, Recorder
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    AnswerStarted,
    FinishReason,
    GenerationRequest,
    Message,
    PromptTokens,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallFinished,
    ToolCallStarted,
)
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prompts.history import History
from leyden.server.gateway.prompts.prefix_index import PrefixIndex
from leyden.server.gateway.prompts.prompt import Prompt
from leyden.server.gateway.prompts.text_index import segment
from leyden.server.gateway.upstream.text import text_of

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


class AnswerSource(Protocol):
    """Answers requests in the format of chat completions, also those that continue a text."""

    @property
    def policy(self) -> str:
        """The policy name of its recorded calls."""

    def chat(self, request: GenerationRequest) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """Return a context with an iterator over the chunks of a stream, or over the one whole completion."""


class Relay:
    """Relays one request and its `n` answers."""

    def __init__(self, recorder: Recorder, call: PreparedCall, source: AnswerSource) -> None:
        request = self._request = call.request
        self._source = source
        self._text = None if request.prompt is None else text_of(request)
        wanted = self._text if request.prompt_logprobs else None
        self._answers = [_RelayedAnswer(choice, wanted) for choice in range(request.n)]
        self._usage: dict[str, Any] = {}
        self._recording = CallRecording(recorder, call, self._recorded)

    async def run(self) -> AsyncGenerator[AnswerEvent, None]:
        """Send the request, yield the events of the answers, and record them before they are finished."""
        async with self._recording:
            async with self._source.chat(self._request) as chunks:
                yield AnswerStarted(self._recording.ids[0], prompt_text=self._text or "")
                async for chunk in chunks:
                    for event in self._feed(chunk):
                        yield event
            for answer in self._answers:
                for event in answer.end():
                    yield event
        details = self._usage.get("prompt_tokens_details") or {}
        completion = self._usage.get("completion_tokens_details") or {}
        for answer, id in zip(self._answers, self._recording.ids, strict=True):
            yield AnswerFinished(
                choice=answer.choice,
                id=id,
                finish=_FINISH_REASONS.get(answer.finish or "", "stop"),
                stop=None,
                prompt_tokens=self._usage.get("prompt_tokens") or 0,
                completion_tokens=(self._usage.get("completion_tokens") or 0) if answer.choice == 0 else 0,
                cached_tokens=details.get("cached_tokens") or 0,
                reasoning_tokens=(completion.get("reasoning_tokens") or 0) if answer.choice == 0 else 0,
            )

    def _feed(self, chunk: dict[str, Any]) -> list[AnswerEvent]:
        self._usage = chunk.get("usage") or self._usage
        events: list[AnswerEvent] = []
        try:
            for at, choice in enumerate(chunk.get("choices") or ()):
                events += self._answers[choice.get("index", at)].feed(choice)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise GatewayError(ErrorKind.FAILED, f"the upstream did not answer with a completion: {error!r}") from error
        return events

    def _recorded(self) -> list[RecordedAnswer]:
        return [
            RecordedAnswer(
                response=answer.message,
                finish=answer.finish or "stop",
                usage=(self._usage or None) if answer.choice == 0 else None,
            )
            for answer in self._answers
        ]


def relayed_prompt(index: PrefixIndex, request: GenerationRequest, policy: str) -> Prompt:
    """Return the prompt of a request that is relayed, which has no token ids."""
    messages = request.messages if request.prompt is None else (segment(text_of(request)),)
    history = History.of(messages, request.tools, policy)
    match = index.match(history)
    return Prompt(history, match, match.origin, match.reason)


class _RelayedCall:
    """A tool call of an upstream's answer as far as it has arrived."""

    def __init__(self) -> None:
        self.id = self.name = self.arguments = ""
        self._announced = False
        self._sent = 0

    def feed(self, delta: dict[str, Any]) -> None:
        """Add a part of it."""
        function = delta.get("function") or {}
        self.id, self.name = delta.get("id") or self.id, function.get("name") or self.name
        arguments = function.get("arguments") or ""
        self.arguments += arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()

    def events(self, choice: int, index: int) -> Iterator[AnswerEvent]:
        """Yield what is new, once id and name are known."""
        if self.id and self.name and not self._announced:
            self._announced = True
            yield ToolCallStarted(choice, index, self.id, self.name)
        if self._announced and (new := self.arguments[self._sent :]):
            self._sent += len(new)
            yield ToolArgumentsDelta(choice, index, new)

    def end(self, choice: int, index: int) -> Iterator[AnswerEvent]:
        """Yield what is left, and the whole call."""
        self.arguments = self.arguments or "{}"
        if not self._announced:
            self._announced = True
            yield ToolCallStarted(choice, index, self.id, self.name)
        yield from self.events(choice, index)
        yield ToolCallFinished(choice, index, self.call)

    @property
    def call(self) -> ToolCall:
        """The call; its arguments are an empty object if there are none."""
        return ToolCall(self.id, self.name, self.arguments or "{}")


class _RelayedAnswer:
    """Assembles one answer from the chunks of a stream, or from one whole completion."""

    def __init__(self, choice: int, prompt: str | None = None) -> None:
        """`prompt` is the text whose tokens the caller wants before the answer."""
        self.choice = choice
        self.finish: str | None = None
        self._prompt = prompt
        self._content = self._reasoning = ""
        self._calls: list[_RelayedCall] = []

    def feed(self, choice: dict[str, Any]) -> list[AnswerEvent]:
        """Add a chunk; return its events."""
        whole = choice.get("message")
        delta = whole or choice.get("delta") or {}
        self.finish = choice.get("finish_reason") or self.finish or ("stop" if whole else None)
        events: list[AnswerEvent] = []
        if self._prompt is not None:
            given = choice.get("prompt") or ()
            offsets = tuple(int(token["offset"]) for token in given)
            events.append(PromptTokens(self.choice, self._prompt, tuple(map(_token, given)), offsets))
            self._prompt = None
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            self._reasoning += reasoning
            events.append(ReasoningDelta(self.choice, reasoning))
        content = delta.get("content") or delta.get("refusal") or ""
        tokens = tuple(map(_token, (choice.get("logprobs") or {}).get("content") or ()))
        if content or tokens:
            self._content += content
            events.append(TextDelta(self.choice, content, tokens))
        for at, call in enumerate(delta.get("tool_calls") or ()):
            index = call.get("index", at)
            while len(self._calls) <= min(index, 1000):
                self._calls.append(_RelayedCall())
            self._calls[index].feed(call)
            if index == len(self._calls) - 1:  # a dialect may have only one call open: others follow at the end
                events.extend(self._calls[index].events(self.choice, index))
        return events

    def end(self) -> list[AnswerEvent]:
        """Return the rest of the tool calls; raise if the upstream stopped before the end."""
        if self.finish is None:
            raise GatewayError(ErrorKind.FAILED, "the upstream closed the stream before its answer was complete")
        return [event for index, call in enumerate(self._calls) for event in call.end(self.choice, index)]

    @property
    def message(self) -> Message | None:
        """The answer as a message; None if the upstream sent nothing."""
        if not (self._content or self._reasoning or self._calls or self.finish):
            return None
        message: Message = {"role": "assistant", "content": self._content}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = [call.call.message_part for call in self._calls]
        return message


def _token(logprob: dict[str, Any]) -> TokenInfo:
    top = tuple((other["token"], _bytes(other), other["logprob"]) for other in logprob.get("top_logprobs") or ())
    return TokenInfo(logprob["token"], _bytes(logprob), logprob["logprob"], top)


def _bytes(logprob: dict[str, Any]) -> bytes:
    data = logprob.get("bytes")
    return str(logprob["token"]).encode() if data is None else bytes(data)


class FixedAnswerSource(Struct, frozen=True):
    """The `AnswerSource` of a route to a fixed answer, for side calls that need no model."""

    answer: str

    @property
    def policy(self) -> str:
        """The policy name of its recorded calls."""
        return "fixed"

    @asynccontextmanager
    async def chat(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Yield an iterator over one whole completion with the answer in every choice."""
        yield self._whole(request.n)

    async def _whole(self, choices: int) -> AsyncIterator[dict[str, Any]]:
        message = {"role": "assistant", "content": self.answer}
        yield {"choices": [{"index": at, "message": message, "finish_reason": "stop"} for at in range(choices)]}
