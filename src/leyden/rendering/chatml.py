"""The renderer of ChatML models with `<tool_call>` JSON: spark, SmolLM2, Qwen2.5 and similar ones.

A fresh prompt has the tokens of the model's own chat template, with one exception: the content of messages, tools and
calls is plain text, so no `<|im_end|>` in it ends a turn. A continued prompt begins with all earlier tokens.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from leyden.rendering.chatml_form import ChatMLForm, as_json, read_form
from leyden.rendering.chatml_parser import AnswerParser, arguments_of
from leyden.rendering.renderer import ParsedResponse, RenderedTokens
from leyden.rendering.tokenizer import Tokenizer, TokenizerError

_Message = Mapping[str, Any]


class _Segment(NamedTuple):
    """A part of the rendered text and the message of its tokens."""

    text: str
    message: int
    """The index of its message; -1 for none."""
    form: bool = False
    """Whether it is template text, in which control tokens are recognised."""


class ChatMLRenderer:
    """Renders conversations and parses answers, for one model. `form` is read from its template if not given.

    With `keeps_reasoning`, turns are extended with their reasoning even if the template drops it.
    """

    def __init__(self, tokenizer: Tokenizer, form: ChatMLForm | None = None, keeps_reasoning: bool = False) -> None:
        form = form or read_form(tokenizer)
        tokens = tokenizer.control_tokens
        if form is None or "<|im_start|>" not in tokens or "<|im_end|>" not in tokens:
            raise TokenizerError(f"{tokenizer.name_or_path}: the model does not use ChatML (<|im_start|>, <|im_end|>)")
        self.form = form
        self._keeps_reasoning = keeps_reasoning or form.keeps_reasoning
        self._tokenizer = tokenizer
        self._start, self._end = tokens["<|im_start|>"], tokens["<|im_end|>"]
        self._answers = AnswerParser(tokenizer)
        stops = (self._end, tokenizer.eos_token_id, tokens.get("<|endoftext|>"))
        self._stops = tuple(dict.fromkeys(id for id in stops if id is not None))

    @property
    def tool_call_texts(self) -> tuple[str, ...]:
        """The texts that begin a tool call; empty if the model has a token for it."""
        return self._answers.tool_call_texts

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens that end an answer, the usual one first."""
        return list(self._stops)

    def render(
        self, messages: list[_Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render a conversation; attribute each token to its message."""
        return self._attributed(self._conversation(messages, tools, add_generation_prompt))

    def render_ids(
        self, messages: list[_Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render a conversation to token ids."""
        return self._ids(self._conversation(messages, tools, add_generation_prompt))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[_Message],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Extend a prompt and its completion by new messages; return None if the template would differ.

        The tools must be those of the earlier prompt. A completion that was cut is closed with the template's tokens.
        """
        close = self._close(previous_prompt_ids, previous_completion_ids)
        if close is None or not new_messages or any(message["role"] == "assistant" for message in new_messages):
            return None
        reasoning = self._answers.reasoning(previous_completion_ids, previous_prompt_ids)
        if reasoning.text is not None and not self._keeps_reasoning:
            return None
        segments = [_Segment(close, -1, form=True), *self._turns(new_messages), *self._generation_prompt()]
        new = self._attributed(segments)
        earlier = [*previous_prompt_ids, *previous_completion_ids]
        return RenderedTokens(earlier + new.token_ids, [-1] * len(earlier) + new.message_indices)

    def begin_call(self, name: str | None) -> list[int]:
        """Return the first tokens of an answer that has to call this tool, or any tool. A name is plain text."""
        start = _Segment("<tool_call>\n", -1, form=True)
        if not name:
            return self._ids([start])
        quoted = as_json(name).replace("<", "\\u003c")  # some models write `</tool_call>` in plain text
        return self._ids([start, _Segment(f'{{"name": {quoted}, "arguments": ', -1)])

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Parse an answer into its exact text, its reasoning and all its tool calls, malformed ones included."""
        end = min((token_ids.index(id) for id in self._stops if id in token_ids), default=len(token_ids))
        return self._answers.parse(token_ids[:end], prompt_ids or ())

    # Rendering

    def _conversation(
        self, messages: Sequence[_Message], tools: Sequence[Mapping[str, Any]] | None, prompt: bool
    ) -> Iterator[_Segment]:
        if not messages:
            raise ValueError("messages: a conversation needs at least one")
        has_system = _role(messages[0]) == "system"
        system = _text(messages[0]) if has_system else self.form.default_system
        if system is not None or tools:
            index = 0 if has_system else -1
            yield _Segment("<|im_start|>system\n", index, form=True)
            yield _Segment(system or "", index, form=not has_system)
            if tools:
                yield _Segment(self.form.tools_before, index, form=True)
                for tool in tools:
                    yield _Segment("\n" + self.form.show_tool(tool), index)
                yield _Segment(self.form.tools_after, index, form=True)
            yield _Segment("<|im_end|>\n", index, form=True)
        yield from self._turns(messages, first=int(has_system))
        if prompt:
            yield from self._generation_prompt()

    def _generation_prompt(self) -> Iterator[_Segment]:
        yield _Segment("<|im_start|>assistant\n", -1, form=True)

    def _turns(self, messages: Sequence[_Message], first: int = 0) -> Iterator[_Segment]:
        roles = [_role(message) for message in messages]
        for index in range(first, len(messages)):
            role, text = roles[index], _text(messages[index])
            if role == "assistant":
                yield _Segment("<|im_start|>assistant\n", index, form=True)
                yield from self._answer(messages[index], text, index)
                yield _Segment("<|im_end|>", index, form=True)
                yield _Segment("\n", index)
            elif role == "tool":
                if index == 0 or roles[index - 1] != "tool":
                    yield _Segment("<|im_start|>user", index, form=True)
                yield _Segment("\n<tool_response>\n", index, form=True)
                yield _Segment(text, index)
                yield _Segment("\n</tool_response>", index, form=True)
                if index + 1 == len(messages) or roles[index + 1] != "tool":
                    yield _Segment("<|im_end|>\n", index, form=True)
            else:
                yield _Segment(f"<|im_start|>{role}\n", index, form=True)
                yield _Segment(text, index)
                yield _Segment("<|im_end|>\n", index, form=True)

    def _answer(self, message: Mapping[str, Any], text: str, index: int) -> Iterator[_Segment]:
        def form(text: str) -> _Segment:
            return _Segment(text, index, form=True)

        def content(text: str) -> _Segment:
            return _Segment(text, index)

        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning and self.form.keeps_reasoning:
            yield from (form("<think>\n"), content(reasoning), form("\n</think>\n\n"))
        yield content(text)
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or call
            yield form('\n<tool_call>\n{"name": "' if text or number else '<tool_call>\n{"name": "')
            yield content(f'{function["name"]}", "arguments": {as_json(arguments_of(function))}}}')
            yield form("\n</tool_call>")

    # Tokens

    def _runs(
        self, segments: Sequence[_Segment] | Iterator[_Segment]
    ) -> Iterator[tuple[int, _Segment] | list[_Segment]]:
        """Yield control tokens with their segment, and between them the segments that are encoded together."""
        run: list[_Segment] = []
        for segment in segments:
            for part in self._tokenizer.split(segment.text) if segment.form else (segment.text,):
                if isinstance(part, str):
                    run.append(segment._replace(text=part))
                else:
                    if run:
                        yield run
                        run = []
                    yield part, segment
        if run:
            yield run

    def _ids(self, segments: Sequence[_Segment] | Iterator[_Segment]) -> list[int]:
        ids: list[int] = []
        for run in self._runs(segments):
            if isinstance(run, tuple):
                ids.append(run[0])
            else:
                ids.extend(self._tokenizer.text_ids("".join(segment.text for segment in run)))
        return ids

    def _attributed(self, segments: Sequence[_Segment] | Iterator[_Segment]) -> RenderedTokens:
        ids: list[int] = []
        owners: list[int] = []
        for run in self._runs(segments):
            if isinstance(run, tuple):
                ids.append(run[0])
                owners.append(run[1].message)
                continue
            texts = [segment for segment in run if segment.text]
            ends: list[int] = []
            for segment in texts:
                ends.append((ends[-1] if ends else 0) + len(segment.text))
            new, offsets = self._tokenizer.encode_text("".join(segment.text for segment in texts))
            ids.extend(new)
            owners.extend(texts[min(bisect_right(ends, start), len(texts) - 1)].message for start, _ in offsets)
        return RenderedTokens(ids, owners)

    # Continuing

    def _close(self, prompt: Sequence[int], completion: Sequence[int]) -> str | None:
        """Return the text that closes an answer before the next turn; None if the answer is not exactly one turn."""
        boundary = next((id for id in reversed(prompt) if id in (self._start, self._end)), None)
        inside = completion[:-1] if completion and completion[-1] == self._end else completion
        if boundary != self._start or any(id == self._start or id in self._stops for id in inside):
            return None
        if len(inside) < len(completion):
            return "\n"
        open_thought = not self._answers.reasoning(completion, prompt).complete
        return "\n</think>\n\n<|im_end|>\n" if open_thought else "<|im_end|>\n"


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if role == "developer":
        return "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"messages: {role!r} is not a role; there are system, developer, user, assistant and tool")
    return str(role)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if not isinstance(part, str) and part.get("type", "text") != "text":
            raise ValueError(f"messages: content of type {part['type']!r} is not supported: this model takes text")
    return "".join(part if isinstance(part, str) else part["text"] for part in content)
