"""One answer while it is being written: tokens go in, what the caller may see of them comes out.

The tokens are the truth; text is a view of them. Text is let out only when no later token can take it back: not half a
character, not the white space that may end the answer, not what may be the beginning of a stop string or a tool call.
"""

import secrets
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

import msgspec

from leyden.engine.protocol import FinishReason, TokenChunk
from leyden.records import VersionRun
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    Message,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
)


class TokenDecoder(Protocol):
    """What is asked of a tokenizer here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens."""


class StreamParser:
    """The state of one answer."""

    def __init__(
        self,
        choice: int,
        renderer: Any,
        tokenizer: TokenDecoder,
        prompt_ids: Sequence[int],
        *,
        forced: Sequence[int] = (),
        tools: Sequence[Any] = (),
        stop: tuple[str, ...] = (),
        logprobs: bool = False,
        watched: bool = True,
    ) -> None:
        self.choice = choice
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.allowed: list[float] = []
        self.finish: FinishReason | None = None
        self.stopped_by: str | None = None
        self.content = ""
        self.reasoning = ""
        self.calls: tuple[ToolCall, ...] = ()
        self._versions: list[int] = []
        self._renderer, self._tokenizer = renderer, tokenizer
        self._prompt_ids, self._tools, self._stop = list(prompt_ids), list(tools), stop
        # Where a model has no token for the mark of a tool call, the mark could begin anywhere in its text.
        self._held_back = (*stop, *getattr(renderer, "text_marks", ()))
        self._forced = list(forced)  # the beginning of the answer that was not left to the model
        self._info: list[TokenInfo] = []
        self._wants_info = logprobs
        self._watched = watched or bool(stop)  # otherwise one look at the end will do
        self._next_look = 1
        self._sent = {"content": 0, "reasoning": 0}

    @property
    def versions(self) -> tuple[VersionRun, ...]:
        """Which version drew which tokens."""
        return tuple(VersionRun(len(list(same)), number) for number, same in groupby(self._versions))

    @property
    def done(self) -> bool:
        """Whether nothing more is wanted of the engine."""
        return self.finish is not None or self.stopped_by is not None

    @property
    def message(self) -> Message:
        """The answer as a message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    def take(self, piece: TokenChunk) -> list[AnswerEvent]:
        """Take up more tokens; what can be shown of them now.

        Looking at the whole answer after each token would take time in its square, so looks grow rarer as it grows.
        """
        self.ids.extend(piece.ids)
        self.logprobs.extend(piece.logprobs)
        self.allowed.extend(piece.allowed)
        self._versions.extend([piece.version] * len(piece.ids))
        self.finish = piece.finish
        if self._wants_info:
            self._info.extend(self._describe(piece))
        if self.finish is None and (not self._watched or len(self.ids) < self._next_look):
            return []
        self._next_look = len(self.ids) + max(1, len(self.ids) // 16)
        self._look()
        return self._show(all_of_it=self.done)

    def give_up(self) -> None:
        """Read what there is of an answer that will not be finished."""
        if self.ids:
            self._look()

    def _look(self) -> None:
        """Read the tokens so far as an answer."""
        parsed = self._renderer.parse_response(
            self._forced + self.ids, tools=self._tools or None, prompt_ids=self._prompt_ids
        )
        content, self.reasoning = parsed.content or "", parsed.reasoning_content or ""
        calls = [call for call in parsed.tool_calls if call.status == "ok"]
        broken = [call for call in parsed.tool_calls if call.status != "ok"]
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := content.find(stop)) >= 0]
        if found:  # the one that was complete first, however many tokens came at once
            _, cut, self.stopped_by = min(found)
            content, calls, broken = content[:cut], [], []
        if self.done:
            for call in broken:  # what the model wrote is shown as it wrote it: nothing of an answer disappears
                content += self._written(call)
            self.calls = tuple(
                ToolCall(f"call_{secrets.token_hex(12)}", call.name, _json(call.arguments)) for call in calls
            )
        self.content = content

    def _written(self, call: Any) -> str:
        if call.token_span is None:
            return str(call.raw)
        start, end = call.token_span
        return self._tokenizer.decode((self._forced + self.ids)[start:end])

    def _show(self, all_of_it: bool) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if more := self._more("reasoning", self.reasoning, all_of_it or bool(self.content)):
            events.append(ReasoningDelta(self.choice, more))
        if more := self._more("content", self.content, all_of_it):
            events.append(TextDelta(self.choice, more, tuple(self._info)))
            self._info.clear()
        events.extend(ToolCallDelta(self.choice, index, call) for index, call in enumerate(self.calls))
        if all_of_it and self._info:
            events.append(TextDelta(self.choice, "", tuple(self._info)))
            self._info.clear()
        return events

    def _more(self, what: str, text: str, all_of_it: bool) -> str:
        end = len(text) if all_of_it else len(_settled(text, self._held_back))
        sent = self._sent[what]
        self._sent[what] = max(sent, end)
        return text[sent:end]

    def _describe(self, piece: TokenChunk) -> list[TokenInfo]:
        infos = []
        for at, (id, logprob) in enumerate(zip(piece.ids, piece.logprobs, strict=True)):
            top = piece.top[at] if piece.top else ()
            likeliest = tuple((text, text.encode(), value) for text, value in ((self._text(o), v) for o, v in top))
            text = self._text(id)
            infos.append(TokenInfo(text, text.encode(), logprob, likeliest))
        return infos

    def _text(self, id: int) -> str:
        return self._tokenizer.decode([id])


def _settled(text: str, stop: tuple[str, ...]) -> str:
    """The beginning of a text that later tokens cannot change."""
    settled = text.rstrip().rstrip("\ufffd").rstrip()
    for string in stop:
        for length in range(min(len(string) - 1, len(settled)), 0, -1):
            if settled.endswith(string[:length]):
                settled = settled[:-length]
                break
    return settled


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
