"""Answers in a given format: the grammar that such an answer follows, token by token.

An answer may think before it says something in the format, where the model has marks for that, and may call tools
instead, where some are offered. What it thinks, and what its calls say, is left to the model.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from leyden.engine.grammar import GrammarError, Grammars
from leyden.server.gateway.ask import Format
from leyden.server.gateway.errors import GatewayError, Trouble
from leyden.server.gateway.tokenizer import Tokenizer

_WHITE = r"( |\n[ \t]{0,20})?"
"""Between the parts of JSON: as much as writers of JSON write there, and not for ever."""
_QUESTION = {"role": "user", "content": "?"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_ASKED = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


class Formats:
    """The grammars of one model's answers, and whether they can be followed; safe to use from any thread."""

    def __init__(self, renderer: Any, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._grammars = Grammars(tokenizer.marked, vocabulary)
        self._thought = [tokenizer.marks.get(mark) for mark in ("<think>", "</think>")]

    def grammar(self, wanted: Format, prompt_ids: Sequence[int], calls: bool) -> str:
        """The grammar of an answer to a prompt, which may be tool calls instead; refused where there is none."""
        if not self._is_plain:
            raise GatewayError(Trouble.INVALID, "this model's answers have a form of their own: ask for no format")
        schema = wanted.get("json_schema", {}).get("schema", {"type": "object"})
        if isinstance(schema, Mapping):
            schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITE}}
        rules = {
            "start": f"{self._thinking(prompt_ids)} (json{' | calls' if calls else ''})",
            "json": f"%json {json.dumps(schema)}",
            **({"calls": self._calls} if calls else {}),
            "TEXT": r"/(.|\n)+/",
            "WHITE": r"/\s{0,8}/",
        }
        grammar = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
        try:
            self._grammars.begin(grammar, self._renderer.get_stop_token_ids())
        except GrammarError as error:
            raise GatewayError(Trouble.INVALID, f"the format of the answer cannot be followed: {error}") from error
        return grammar

    def _thinking(self, prompt_ids: Sequence[int]) -> str:
        """What may come before the answer itself."""
        begin, end = self._thought
        if begin is None or end is None:
            return ""
        close = f"TEXT? <[{end}]> WHITE"
        return close if self._is_open(prompt_ids) else f"(<[{begin}]> {close})?"

    def _is_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends within a thought."""
        marks = set(self._tokenizer.marks.values())
        return next((id for id in reversed(prompt_ids) if id in marks), None) == self._thought[0] is not None

    @cached_property
    def _is_plain(self) -> bool:
        """Whether an answer is nothing but what it says."""
        said = self._answer({"role": "assistant", "content": "said"})
        return said is not None and self._tokenizer.decode(said).startswith("said")

    @cached_property
    def _calls(self) -> str:
        """Tool calls: what begins them, and then anything that may be part of them."""
        calls = self._answer({"role": "assistant", "content": "", "tool_calls": [_ASKED, _ASKED]}) or [-1]
        marks = set(self._tokenizer.marks.values()) - set(self._renderer.get_stop_token_ids())
        if calls[0] in marks:
            inside = " | ".join(f"<[{id}]>" for id in dict.fromkeys(calls) if id in marks)
            return f"<[{calls[0]}]> (TEXT | {inside})*"
        for begin in getattr(self._renderer, "text_marks", ()):
            return f"{json.dumps(begin)} TEXT?"
        why = "this model's tool calls cannot be told from an answer in a format: send a format or tools, not both"
        raise GatewayError(Trouble.INVALID, why)

    def _answer(self, message: Mapping[str, Any]) -> list[int] | None:
        """What follows the prompt where this is the answer, less what was thought; None where something else does."""
        tools = [_TOOL] if "tool_calls" in message else None
        prompt = self._renderer.render_ids([_QUESTION], tools=tools, add_generation_prompt=True)
        if self._is_open(prompt):
            prompt = prompt[: len(prompt) - 1 - prompt[::-1].index(self._thought[0])]
        whole = self._renderer.render_ids([_QUESTION, message], tools=tools)
        if whole[: len(prompt)] != prompt:
            return None
        answer = whole[len(prompt) :]
        if answer and answer[0] == self._thought[0] and self._thought[1] in answer:
            answer = answer[answer.index(self._thought[1]) + 1 :]
            while answer and not self._tokenizer.decode(answer[:1]).strip():
                answer = answer[1:]
        return list(answer)
