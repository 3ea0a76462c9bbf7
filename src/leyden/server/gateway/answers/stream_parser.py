"""Parses one answer while it is generated: token chunks in, `AnswerEvent`s out.

Text is emitted only when no later token can change it. Withheld are incomplete characters, white space that may end the
answer, and what may be the beginning of a stop string or a tool call. Tool calls are streamed as they are sampled.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from leyden.engine.protocol import FinishReason, TokenChunk
from leyden.records import Call, VersionRun
from leyden.rendering.renderer import ParsedResponse, ParsedToolCall, ResponseParser, ToolCallStatus, tool_call_texts
from leyden.server.gateway.answers.tool_call_stream import ToolCallStream
from leyden.server.gateway.answers.unmarked_calls import OPENINGS, find_unmarked_call, settled_length
from leyden.server.gateway.dialects.types import AnswerEvent, Message, ReasoningDelta, TextDelta, TokenInfo, ToolCall
from leyden.server.gateway.prompts.reasoning_tokens import TokenDecoder, count_reasoning_tokens

_LABELS = ("thought\n",)
"""What Gemma writes before its reasoning: a label until its line is complete."""


class StreamParser:
    """Collects the tokens of one answer and parses them."""

    def __init__(
        self,
        choice: int,
        renderer: ResponseParser,
        tokenizer: TokenDecoder,
        prompt_ids: list[int],
        *,
        reasoning_end: int | None = None,
        forced: Sequence[int] = (),
        tools: Sequence[Any] = (),
        may_call: Callable[[str], bool] = lambda tool: True,
        parallel_calls: bool = True,
        unmarked: bool = False,
        stop: tuple[str, ...] = (),
        logprobs: bool = False,
        streamed: bool = True,
        replayed: Call | None = None,
    ) -> None:
        """`reasoning_end` is the token that ends the reasoning of an answer, if there is one.

        The tool calls of an answer that is `replayed` keep their ids.
        """
        self.choice = choice
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.allowed: list[float] = []
        self.finish: FinishReason | None = None
        self.stopped_by: str | None = None
        self.context_tail = 0
        """Tokens at the end whose text goes beyond the stop string that ended the answer."""
        self.content = ""
        self.reasoning = ""
        self._versions: list[int] = []
        self._renderer, self._tokenizer = renderer, tokenizer
        self._prompt_ids, self._tools, self._stop = prompt_ids, list(tools), stop
        self._unmarked = frozenset(tool["function"]["name"] for tool in tools) if unmarked else frozenset()
        self._withheld = (*stop, *tool_call_texts(renderer), *(OPENINGS if self._unmarked else ()))
        self._reasoning_end = reasoning_end
        self._forced = list(forced)  # the beginning of the answer, which was not sampled
        self._infos: list[TokenInfo] = []
        self._logprobs_wanted = logprobs
        self._streamed = streamed
        self._parallel_calls, self._may_call = parallel_calls, may_call
        self._incremental = streamed or bool(stop) or not parallel_calls  # otherwise it parses once, at the end
        self._next_parse = 1
        self._sent = {"content": 0, "reasoning": 0}
        called = (replayed.response or {}).get("tool_calls") or () if replayed is not None else ()
        self._tool_calls = ToolCallStream(choice, may_call, (call["id"] for call in called))
        self._known_call_events: list[AnswerEvent] = []
        self._new_call_events: list[AnswerEvent] = []
        self._inside_call = False

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the answer, once it is complete."""
        return self._tool_calls.calls

    @property
    def versions(self) -> tuple[VersionRun, ...]:
        """Which weight version sampled which tokens."""
        return tuple(VersionRun(len(list(same)), number) for number, same in groupby(self._versions))

    @property
    def done(self) -> bool:
        """Whether the answer is complete and the engine can stop."""
        return self.finish is not None or self.stopped_by is not None

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens the reasoning has."""
        return count_reasoning_tokens(self._tokenizer, self.ids, self.reasoning) if self.reasoning else 0

    @property
    def message(self) -> Message:
        """The answer as a message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.message_part for call in self.calls]
        return message

    def feed(self, chunk: TokenChunk) -> list[AnswerEvent]:
        """Add tokens; return the events that they complete.

        Each parse reads the whole answer, so the distance between parses grows with it to keep the cost linear.
        """
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        self.allowed.extend(chunk.allowed)
        self._versions.extend([chunk.version] * len(chunk.ids))
        self.finish = chunk.finish
        if self._logprobs_wanted:
            self._infos.extend(self._token_infos(chunk))
        if self.finish is None and (not self._incremental or len(self.ids) < self._next_parse):
            return []
        self._next_parse = len(self.ids) + max(1, len(self.ids) // 16)
        self._parse()
        return self._new_events(final=self.done)

    def parse_partial(self) -> None:
        """Parse what there is of an answer that will not be finished."""
        if self.ids:
            self._parse(partial=True)

    def _parse(self, partial: bool = False) -> None:
        parsed = self._parsed()
        in_reasoning = not self.done and parsed.reasoning_content is not None and self._reasoning_is_open()
        if not self._parallel_calls and not in_reasoning and self._end_after_call(parsed.tool_calls):
            parsed = self._parsed()
        self.content, self.reasoning = parsed.content or "", self._reasoning_of(parsed)
        calls = list(parsed.tool_calls)
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self.content.find(stop)) >= 0]
        if found:  # the stop string that was complete first, even if one chunk held several
            _, cut, self.stopped_by = min(found)
            self.content = self.content[:cut]
            calls = self._end_at(self.stopped_by)
        if self._unmarked and self.finish == "stop" and not any(call.status == ToolCallStatus.OK for call in calls):
            written = self.content + "".join(self._text_of_call(call) for call in calls)
            found_call = find_unmarked_call(written, self._unmarked)
            if found_call is not None:
                self.content, calls = found_call.text, [found_call.call]
        if self.done or partial:
            self._known_call_events, self._new_call_events, unsent = self._tool_calls.finish(calls, only_sent=partial)
            for call in unsent:  # a malformed call is shown as text: nothing of an answer disappears
                self.content += self._text_of_call(call)
        elif self._streamed and not in_reasoning:
            self._known_call_events, self._new_call_events = self._tool_calls.advance(calls)
            self._inside_call = self._tool_calls.is_open(len(calls) - 1)

    def _parsed(self, length: int | None = None) -> ParsedResponse:
        """Parse the answer, or so many of its tokens."""
        ids = self._forced + self.ids[:length]
        return self._renderer.parse_response(ids, tools=self._tools or None, prompt_ids=self._prompt_ids)

    def _reasoning_of(self, parsed: ParsedResponse) -> str:
        """Return the reasoning of an answer; if it is open, as it will begin when it is closed."""
        if parsed.reasoning_complete is False and self._reasoning_end is not None:
            closed = [*self._forced, *self.ids, self._reasoning_end]
            parsed = self._renderer.parse_response(closed, prompt_ids=self._prompt_ids)
        return (parsed.reasoning_content or "").lstrip()

    def _end_after_call(self, calls: Sequence[ParsedToolCall]) -> bool:
        """End the answer after its first tool call if more than the end of the turn follows it.

        The tokens that follow are dropped. An answer whose parser does not report the tokens of a call continues.
        """
        ended = (call for call in calls if call.status == ToolCallStatus.OK and self._may_call(call.name or ""))
        spans = [call.token_span for call in ended]
        if not spans or spans[0] is None:
            return False
        length = spans[0][1] - len(self._forced)
        end = len(self.ids) - (self.finish == "stop")
        if not self._tokenizer.decode(self.ids[length:end]).strip():
            return False
        self._keep(length)
        self.finish = "stop"
        return True

    def _keep(self, length: int) -> None:
        """Drop the tokens after this many."""
        if dropped := len(self.ids) - length:
            del self._infos[-dropped:]
        del self.ids[length:], self.logprobs[length:], self.allowed[length:], self._versions[length:]

    def _reasoning_is_open(self) -> bool:
        """Whether what looks like a tool call may turn out to be part of the reasoning."""
        return "</think>" not in self._decode(len(self.ids))

    def _end_at(self, stop: str) -> list[ParsedToolCall]:
        """Drop the tokens after the one that completes a stop string; return the tool calls of those that stay.

        A chunk can hold several tokens, and the answer is not parsed after each, so how many follow is arbitrary. If
        the text of the last token extends beyond the stop string, the model chose it for a longer text. If its
        client sees nothing that follows a tool call, the answer ends with the call.
        """
        lengths = range(1, len(self.ids) + 1)
        length = lengths[bisect_left(lengths, True, key=lambda n: stop in (self._parsed(n).content or ""))]
        while self._decode(length - 1).endswith(stop):  # white space that a parser shows only before more text
            length -= 1
        self._keep(length)
        self.context_tail = int(not self._decode(len(self.ids)).endswith(stop))
        calls = list(self._parsed().tool_calls)
        span = calls[-1].token_span if calls else None
        if span is not None:
            length = span[1] - len(self._forced)
            if (self._parsed(length).content or "").rstrip() == self.content.rstrip():
                self._keep(length)
                self.context_tail = 0
        return calls

    def _decode(self, length: int) -> str:
        return self._tokenizer.decode(self._forced + self.ids[:length])

    def _text_of_call(self, call: ParsedToolCall) -> str:
        if call.token_span is None:
            return str(call.raw)
        start, end = call.token_span
        return self._tokenizer.decode((self._forced + self.ids)[start:end])

    def _new_events(self, final: bool) -> list[AnswerEvent]:
        """Return what has become certain: the rest of known tool calls, text after them, then new tool calls."""
        events, new_calls = self._known_call_events, self._new_call_events
        self._known_call_events, self._new_call_events = [], []
        if new := self._unsent("reasoning", self.reasoning, _LABELS, final or bool(self.content) or bool(new_calls)):
            events.append(ReasoningDelta(self.choice, new))
        if new := self._unsent("content", self.content, self._withheld, final or self._inside_call):
            events.append(TextDelta(self.choice, new, tuple(self._infos)))
            self._infos.clear()
        events.extend(new_calls)
        if final and self._infos:
            events.append(TextDelta(self.choice, "", tuple(self._infos)))
            self._infos.clear()
        return events

    def _unsent(self, part: str, text: str, withheld: tuple[str, ...], final: bool) -> str:
        end = len(text) if final else len(_stable_prefix(text, withheld))
        if self._unmarked and not final and part == "content":
            end = len(text[: min(end, settled_length(text))].rstrip())
        sent = self._sent[part]
        self._sent[part] = max(sent, end)
        return text[sent:end]

    def _token_infos(self, chunk: TokenChunk) -> list[TokenInfo]:
        infos = []
        for at, (id, logprob) in enumerate(zip(chunk.ids, chunk.logprobs, strict=True)):
            top = chunk.top[at] if chunk.top else ()
            alternatives = tuple((*self._written(other), value) for other, value in top)
            infos.append(TokenInfo(*self._written(id), logprob, alternatives, id))
        return infos

    def _written(self, id: int) -> tuple[str, bytes]:
        return self._tokenizer.decode([id]), self._tokenizer.token_bytes(id)


def _stable_prefix(text: str, withheld: tuple[str, ...]) -> str:
    """Return the beginning of a text that later tokens cannot change."""
    stable = text.rstrip().rstrip("\ufffd").rstrip()
    for string in withheld:
        for length in range(min(len(string) - 1, len(stable)), 0, -1):
            if stable.endswith(string[:length]):
                stable = stable[:-length]
                break
    return stable
