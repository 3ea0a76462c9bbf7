"""Builds the grammars of answers in a given format.

Where the model has tokens for reasoning, it may reason before the answer; where tools are offered, it may call them
instead. The grammar constrains neither the reasoning nor the calls.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from math import prod
from typing import Any

from leyden.engine.grammar import GrammarError
from leyden.engine.grammar_checker import GrammarChecker
from leyden.rendering.renderer import ChatRenderer, tool_call_texts
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.dialects.types import Format
from leyden.server.gateway.errors import ErrorKind, GatewayError

_WHITE = r"( |\n[ \t]{0,20})?"
"""White space between the parts of JSON, bounded so that an answer cannot consist of it."""
_MAX_SCHEMA = 1 << 17
"""The most characters of a schema."""
_MAX_MULTIPLE = 10_000
"""The largest `multipleOf`: the time and memory of its automaton grow with it."""
_QUESTION = {"role": "user", "content": "?"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class StructuredOutput:
    """Builds and checks the grammars of one model's answers."""

    def __init__(self, renderer: ChatRenderer, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._checker = GrammarChecker(tokenizer.control_json, vocabulary)
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self._think = [tokenizer.control_tokens.get(token) for token in ("<think>", "</think>")]

    async def grammar(self, wanted: Format, prompt_ids: Sequence[int], calls: bool, session: str = "") -> str:
        """Return the grammar of an answer to a prompt, with tool calls as an alternative; raise where there is none.

        The grammars of one session are checked one after another.
        """
        if not self._answers_are_plain:
            message = "this model wraps its answers in a format that cannot be combined with another: request no format"
            raise GatewayError(ErrorKind.INVALID, message)
        rules = {
            "start": f"{self._reasoning(prompt_ids)} (json{' | calls' if calls else ''})",
            "json": f"%json {_schema(wanted)}",
            **({"calls": self._tool_calls} if calls else {}),
            "TEXT": r"/(.|\n)+/",
            "WHITE": r"/\s{0,8}/",
        }
        grammar = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
        try:
            await self._checker.check(grammar, self._renderer.get_stop_token_ids(), session)
        except GrammarError as error:
            raise _unsupported(str(error).rpartition("failed to compile JSON schema: ")[2]) from error
        return grammar

    def _reasoning(self, prompt_ids: Sequence[int]) -> str:
        """Return the rule for reasoning before the answer."""
        begin, end = self._think
        if begin is None or end is None:
            return ""
        close = f"TEXT? <[{end}]> WHITE"
        return close if self._in_reasoning(prompt_ids) else f"(<[{begin}]> {close})?"

    def _in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside reasoning."""
        return next((id for id in reversed(prompt_ids) if id in self._control_ids), None) == self._think[0] is not None

    @cached_property
    def _answers_are_plain(self) -> bool:
        """Whether an answer begins with its text, without tokens around it."""
        ids = self._answer({"role": "assistant", "content": "text"})
        return ids is not None and self._tokenizer.decode(ids).startswith("text")

    @cached_property
    def _tool_calls(self) -> str:
        """Return the rule for tool calls: what begins them, then anything that may be part of them."""
        for calls_of_message in [_CALL, _CALL], [_CALL]:  # some templates take one call only
            calls = self._answer({"role": "assistant", "content": "", "tool_calls": calls_of_message})
            if calls and calls[0] in self._control_ids:
                inside = self._control_ids.intersection(calls).difference(self._renderer.get_stop_token_ids())
                return f"<[{calls[0]}]> (TEXT | {' | '.join(f'<[{id}]>' for id in sorted(inside))})*"
        for text in tool_call_texts(self._renderer):
            return f"{json.dumps(text)} TEXT?"
        message = "this model's tool calls look like an answer in a format: send a format or tools, not both"
        raise GatewayError(ErrorKind.INVALID, message)

    def _answer(self, message: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens of an answer without its reasoning; None where the template changes the prompt."""
        tools = [_TOOL] if "tool_calls" in message else None
        try:
            prompt = self._renderer.render_ids([_QUESTION], tools=tools, add_generation_prompt=True)
            whole = self._renderer.render_ids([_QUESTION, message], tools=tools)
        except Exception:  # a template may refuse any conversation, and a renderer in any way
            return None
        think = self._think[0]
        if think is not None and self._in_reasoning(prompt):
            prompt = prompt[: len(prompt) - 1 - prompt[::-1].index(think)]
        if whole[: len(prompt)] != prompt:
            return None
        answer = whole[len(prompt) :]
        if answer and answer[0] == self._think[0] and self._think[1] in answer:
            answer = answer[answer.index(self._think[1]) + 1 :]
            while answer and not self._tokenizer.decode(answer[:1]).strip():
                answer = answer[1:]
        return list(answer)


def _schema(wanted: Format) -> str:
    """Return the schema of a format; raise where it is too large."""
    schema = wanted["json_schema"]["schema"] if wanted["type"] == "json_schema" else {"type": "object"}
    try:
        text = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITE}})
        steps = [max(number.as_integer_ratio()) for number in _multiples(schema)]
    except RecursionError:
        raise _unsupported("its schema is nested too deep") from None
    if len(text) > _MAX_SCHEMA:
        raise _unsupported(f"its schema has {len(text)} characters, and may have {_MAX_SCHEMA}")
    if (prod(steps) if '"allOf"' in text else max(steps, default=0)) > _MAX_MULTIPLE:
        limit = f"`multipleOf` may be at most {_MAX_MULTIPLE}, and so may their product in a schema with `allOf`"
        raise _unsupported(limit)
    return text


def _multiples(schema: Any) -> Iterator[Decimal]:
    """Yield every `multipleOf` of a schema."""
    if isinstance(schema, dict):
        step = schema.get("multipleOf")
        if isinstance(step, (int, float)) and not isinstance(step, bool) and step > 0:
            yield Decimal(str(step))
        for part in schema.values():
            yield from _multiples(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _multiples(part)


def _unsupported(reason: str) -> GatewayError:
    return GatewayError(ErrorKind.INVALID, f"the format of the answer cannot be enforced: {reason}")
