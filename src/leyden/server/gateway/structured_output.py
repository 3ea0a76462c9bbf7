"""Answers in a given format: the grammar that such an answer follows, token by token.

An answer may think before it says something in the format, where the model has marks for that, and may call tools
instead, where some are offered. What it thinks, and what its calls say, is left to the model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from math import prod
from typing import Any

from leyden.engine.grammar import GrammarCompiler, GrammarError
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.dialects.types import Format
from leyden.server.gateway.errors import ErrorKind, GatewayError

_WHITE = r"( |\n[ \t]{0,20})?"
"""Between the parts of JSON: as much as writers of JSON write there, and not for ever."""
_LONGEST = 1 << 17
"""Characters of a schema."""
_MULTIPLE = 10_000
"""The largest `multipleOf`: what it takes to count in such steps, in time and memory, grows with it."""
_QUESTION = {"role": "user", "content": "?"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_ASKED = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class StructuredOutput:
    """The grammars of one model's answers, and whether they can be followed."""

    def __init__(self, renderer: Any, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._grammars = GrammarCompiler(tokenizer.marked, vocabulary)
        self._marks = frozenset(tokenizer.marks.values())
        self._thought = [tokenizer.marks.get(mark) for mark in ("<think>", "</think>")]

    async def grammar(self, wanted: Format, prompt_ids: Sequence[int], calls: bool) -> str:
        """The grammar of an answer to a prompt, which may be tool calls instead; refused where there is none."""
        if not self._is_plain:
            raise GatewayError(ErrorKind.INVALID, "this model's answers have a form of their own: ask for no format")
        rules = {
            "start": f"{self._thinking(prompt_ids)} (json{' | calls' if calls else ''})",
            "json": f"%json {_schema(wanted)}",
            **({"calls": self._calls} if calls else {}),
            "TEXT": r"/(.|\n)+/",
            "WHITE": r"/\s{0,8}/",
        }
        grammar = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
        try:
            await self._grammars.new_matcher(grammar, self._renderer.get_stop_token_ids())
        except GrammarError as error:
            raise _unfit(str(error).rpartition("failed to compile JSON schema: ")[2]) from error
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
        return next((id for id in reversed(prompt_ids) if id in self._marks), None) == self._thought[0] is not None

    @cached_property
    def _is_plain(self) -> bool:
        """Whether an answer is nothing but what it says."""
        said = self._answer({"role": "assistant", "content": "said"})
        return said is not None and self._tokenizer.decode(said).startswith("said")

    @cached_property
    def _calls(self) -> str:
        """Tool calls: what begins them, and then anything that may be part of them."""
        for asked in [_ASKED, _ASKED], [_ASKED]:  # some templates take one call only
            calls = self._answer({"role": "assistant", "content": "", "tool_calls": asked})
            if calls and calls[0] in self._marks:
                inside = self._marks.intersection(calls).difference(self._renderer.get_stop_token_ids())
                return f"<[{calls[0]}]> (TEXT | {' | '.join(f'<[{id}]>' for id in sorted(inside))})*"
        for begin in getattr(self._renderer, "text_marks", ()):
            return f"{json.dumps(begin)} TEXT?"
        why = "this model's tool calls cannot be told from an answer in a format: send a format or tools, not both"
        raise GatewayError(ErrorKind.INVALID, why)

    def _answer(self, message: Mapping[str, Any]) -> list[int] | None:
        """What follows the prompt where this is the answer, less what was thought; None where something else does."""
        tools = [_TOOL] if "tool_calls" in message else None
        try:
            prompt = self._renderer.render_ids([_QUESTION], tools=tools, add_generation_prompt=True)
            whole = self._renderer.render_ids([_QUESTION, message], tools=tools)
        except Exception:  # a template may refuse any conversation, and a renderer in any way
            return None
        if self._is_open(prompt):
            prompt = prompt[: len(prompt) - 1 - prompt[::-1].index(self._thought[0])]
        if whole[: len(prompt)] != prompt:
            return None
        answer = whole[len(prompt) :]
        if answer and answer[0] == self._thought[0] and self._thought[1] in answer:
            answer = answer[answer.index(self._thought[1]) + 1 :]
            while answer and not self._tokenizer.decode(answer[:1]).strip():
                answer = answer[1:]
        return list(answer)


def _schema(wanted: Format) -> str:
    """The schema of a format, if it is not too much to ask."""
    schema = wanted["json_schema"]["schema"] if wanted["type"] == "json_schema" else {"type": "object"}
    try:
        text = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITE}})
        steps = [max(number.as_integer_ratio()) for number in _multiples(schema)]
    except RecursionError:
        raise _unfit("its schema is nested too deep") from None
    if len(text) > _LONGEST:
        raise _unfit(f"its schema has {len(text)} characters, and may have {_LONGEST}")
    if (prod(steps) if '"allOf"' in text else max(steps, default=0)) > _MULTIPLE:
        raise _unfit(f"`multipleOf` may be {_MULTIPLE} at the most, and all of them together where there is an `allOf`")
    return text


def _multiples(schema: Any) -> Iterator[Decimal]:
    """Every number that something is to be a multiple of."""
    if isinstance(schema, dict):
        step = schema.get("multipleOf")
        if isinstance(step, (int, float)) and step > 0:
            yield Decimal(str(step))
        for part in schema.values():
            yield from _multiples(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _multiples(part)


def _unfit(why: str) -> GatewayError:
    return GatewayError(ErrorKind.INVALID, f"the format of the answer cannot be followed: {why}")
