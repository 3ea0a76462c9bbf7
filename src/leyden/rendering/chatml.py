"""One renderer for the ChatML models with `<tool_call>` JSON: spark, SmolLM2, Qwen2.5 and their kin.

On a fresh prompt its tokens are those of the model's own chat template, with one exception. What a message, a tool or a
call says stays text: no `<|im_end|>` in it ever ends a turn. A continued prompt begins with all the tokens of before.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from renderers import BaseRendererConfig
from renderers.base import (
    Message,
    ParsedResponse,
    RenderedTokens,
    ToolSpec,
    extract_message_tool_names,
)

from leyden.rendering.chatml_form import ChatMLForm, as_json, read_form
from leyden.rendering.chatml_parser import AnswerParser, arguments_of
from leyden.rendering.tokenizer import Tokenizer, TokenizerError


class ChatMLConfig(BaseRendererConfig):
    """Which form of ChatML; None reads it off the model's template."""

    name: Literal["chatml"] = "chatml"
    form: ChatMLForm | None = None
    _internal_fields = frozenset({"form"})


class _Piece(NamedTuple):
    """A stretch of text, and what its tokens are."""

    text: str
    message: int
    """Which message it belongs to; -1 for none."""
    form: bool = False
    """Whether marks in it are marks."""
    body: bool = False
    """Whether a message says it, rather than the form around it."""
    sampled: bool = False


class ChatMLRenderer:
    """Conversations to tokens and back, for one model."""

    config_class: ClassVar[type[BaseRendererConfig]] = ChatMLConfig

    def __init__(self, tokenizer: Tokenizer, config: ChatMLConfig | None = None) -> None:
        self.config = config or ChatMLConfig()
        form = self.config.form or read_form(tokenizer)
        marks = tokenizer.marks
        if form is None or "<|im_start|>" not in marks or "<|im_end|>" not in marks:
            raise TokenizerError(
                f"{tokenizer.name_or_path}: the model does not speak ChatML (<|im_start|>, <|im_end|>)"
            )
        self.form = form
        self._tokenizer = tokenizer
        self._start, self._end = marks["<|im_start|>"], marks["<|im_end|>"]
        self._answers = AnswerParser(tokenizer)
        stops = (self._end, tokenizer.eos_token_id, marks.get("<|endoftext|>"))
        self._stops = tuple(dict.fromkeys(id for id in stops if id is not None))

    @property
    def tool_call_texts(self) -> tuple[str, ...]:
        """What in an answer's text begins a tool call, where the model has no token for that."""
        return self._answers.tool_call_texts

    @property
    def is_prefix_stable(self) -> bool:
        """No message changes how an earlier turn is written."""
        return True

    def get_stop_token_ids(self) -> list[int]:
        """The tokens that end an answer, the usual one first."""
        return list(self._stops)

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """A conversation's tokens, each with the message that it belongs to."""
        return self._attributed(list(self._conversation(messages, tools, add_generation_prompt)), messages)

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """A conversation's tokens."""
        return self._ids(self._conversation(messages, tools, add_generation_prompt))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """The next prompt: all the tokens of before, then only what is new; None where that would not be exact.

        The caller sees to it that the tools are those of before. A turn that was cut is closed by tokens of ours.
        """
        close = self._close(previous_prompt_ids, previous_completion_ids)
        if close is None or not new_messages or any(message["role"] == "assistant" for message in new_messages):
            return None
        if self._forgets(previous_prompt_ids, previous_completion_ids, new_messages):
            return None
        pieces = [_Piece(close, -1, form=True), *self._turns(new_messages), *self._generation_prompt()]
        new = self._attributed(pieces, new_messages)
        before = len(previous_prompt_ids) + len(previous_completion_ids)
        return RenderedTokens(
            token_ids=[*previous_prompt_ids, *previous_completion_ids, *new.token_ids],
            message_indices=[-1] * before + new.message_indices,
            sampled_mask=[False] * (before + len(new.token_ids)),
            is_content=[False] * before + new.is_content,
            message_roles=new.message_roles,
            message_tool_names=new.message_tool_names,
        )

    def begin_call(self, name: str | None) -> list[int]:
        """The beginning of an answer that must be a tool call, of this tool or of any."""
        text = "<tool_call>\n" + (f'{{"name": {json.dumps(name)}, "arguments": ' if name else "")
        return self._ids([_Piece(text, -1, form=True)])

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[ToolSpec] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """What an answer says: its text to the letter, its reasoning, and every tool call that it tries."""
        end = next((at for at, id in enumerate(token_ids) if id in self._stops), len(token_ids))
        return self._answers.read(token_ids[:end], prompt_ids or ())

    # Writing

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, prompt: bool
    ) -> Iterator[_Piece]:
        if not messages:
            raise ValueError("messages: a conversation has at least one")
        led = _role(messages[0]) == "system"
        system = _text(messages[0]) if led else self.form.default_system
        if system is not None or tools:
            index = 0 if led else -1
            yield _Piece("<|im_start|>system\n", index, form=True)
            yield _Piece(system or "", index, form=not led, body=led)
            if tools:
                yield _Piece(self.form.tools_before, index, form=True)
                for tool in tools:
                    yield _Piece("\n" + self.form.show_tool(tool), index)
                yield _Piece(self.form.tools_after, index, form=True)
            yield _Piece("<|im_end|>\n", index, form=True)
        yield from self._turns(messages, first=int(led))
        if prompt:
            yield from self._generation_prompt()

    def _generation_prompt(self) -> Iterator[_Piece]:
        yield _Piece("<|im_start|>assistant\n", -1, form=True)

    def _turns(self, messages: Sequence[Message], first: int = 0) -> Iterator[_Piece]:
        roles = [_role(message) for message in messages]
        for index in range(first, len(messages)):
            role, text = roles[index], _text(messages[index])
            if role == "assistant":
                yield _Piece("<|im_start|>assistant\n", index, form=True)
                yield from self._answer(messages[index], text, index)
                yield _Piece("<|im_end|>", index, form=True, body=True, sampled=True)
                yield _Piece("\n", index)
            elif role == "tool":
                if index == 0 or roles[index - 1] != "tool":
                    yield _Piece("<|im_start|>user", index, form=True)
                yield _Piece("\n<tool_response>\n", index, form=True)
                yield _Piece(text, index, body=True)
                yield _Piece("\n</tool_response>", index, form=True)
                if index + 1 == len(messages) or roles[index + 1] != "tool":
                    yield _Piece("<|im_end|>\n", index, form=True)
            else:
                yield _Piece(f"<|im_start|>{role}\n", index, form=True)
                yield _Piece(text, index, body=True)
                yield _Piece("<|im_end|>\n", index, form=True)

    def _answer(self, message: Mapping[str, Any], text: str, index: int) -> Iterator[_Piece]:
        def form(text: str) -> _Piece:
            return _Piece(text, index, form=True, body=True, sampled=True)

        def said(text: str) -> _Piece:
            return _Piece(text, index, body=True, sampled=True)

        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning and self.form.keeps_reasoning:
            yield from (form("<think>\n"), said(reasoning), form("\n</think>\n\n"))
        yield said(text)
        for number, call in enumerate(message.get("tool_calls") or ()):
            asked = call.get("function") or call
            yield form('\n<tool_call>\n{"name": "' if text or number else '<tool_call>\n{"name": "')
            yield said(f'{asked["name"]}", "arguments": {as_json(arguments_of(asked))}}}')
            yield form("\n</tool_call>")

    # Tokens

    def _runs(self, pieces: Sequence[_Piece] | Iterator[_Piece]) -> Iterator[tuple[int, _Piece] | list[_Piece]]:
        """Marks with their piece, and between them the text that is encoded in one go, as the template's is."""
        run: list[_Piece] = []
        for piece in pieces:
            for part in self._tokenizer.split(piece.text) if piece.form else (piece.text,):
                if isinstance(part, str):
                    run.append(piece._replace(text=part))
                else:
                    if run:
                        yield run
                        run = []
                    yield part, piece
        if run:
            yield run

    def _ids(self, pieces: Sequence[_Piece] | Iterator[_Piece]) -> list[int]:
        ids: list[int] = []
        for run in self._runs(pieces):
            if isinstance(run, tuple):
                ids.append(run[0])
            else:
                ids.extend(self._tokenizer.text_ids("".join(piece.text for piece in run)))
        return ids

    def _attributed(self, pieces: Sequence[_Piece], messages: Sequence[Message]) -> RenderedTokens:
        ids: list[int] = []
        owners: list[_Piece] = []
        for run in self._runs(pieces):
            if isinstance(run, tuple):
                ids.append(run[0])
                owners.append(run[1])
                continue
            texts = [piece for piece in run if piece.text]
            ends: list[int] = []
            for piece in texts:
                ends.append((ends[-1] if ends else 0) + len(piece.text))
            new, offsets = self._tokenizer.encode_text("".join(piece.text for piece in texts))
            ids.extend(new)
            owners.extend(texts[min(bisect_right(ends, start), len(texts) - 1)] for start, _ in offsets)
        return RenderedTokens(
            token_ids=ids,
            message_indices=[piece.message for piece in owners],
            sampled_mask=[piece.sampled for piece in owners],
            is_content=[piece.body for piece in owners],
            message_roles=[message["role"] for message in messages],
            message_tool_names=extract_message_tool_names(list(messages)),
        )

    # Continuing

    def _close(self, prompt: Sequence[int], completion: Sequence[int]) -> str | None:
        """What has to follow an answer before the next turn; None where the answer is not one turn of its own."""
        mark = next((id for id in reversed(prompt) if id in (self._start, self._end)), None)
        inside = completion[:-1] if completion and completion[-1] == self._end else completion
        if mark != self._start or any(id == self._start or id in self._stops for id in inside):
            return None
        if len(inside) < len(completion):
            return "\n"
        open_thought = not self._answers.reasoning(completion, prompt).complete
        return "\n</think>\n\n<|im_end|>\n" if open_thought else "<|im_end|>\n"

    def _forgets(self, prompt: Sequence[int], completion: Sequence[int], new: Sequence[Message]) -> bool:
        """Whether the model's template would leave out reasoning that the answer holds."""
        if self.form.keeps_reasoning or self._answers.reasoning(completion, prompt).text is None:
            return False
        kept = self.config.thinking_retention
        return kept != "all" and (kept is None or any(message["role"] == "user" for message in new))


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
            raise ValueError(f"messages: content of type {part['type']!r} cannot be shown to a model of text")
    return "".join(part if isinstance(part, str) else part["text"] for part in content)
