"""Builds the grammars of answers in a given format.

If the model has tokens for reasoning, it may reason before the answer; if tools are offered, it may call them
instead. The grammar constrains neither the reasoning nor the calls. Another grammar constrains tool calls to the
offered tools, and the arguments of strict tools to their schemas.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from leyden.engine.grammar import GrammarError
from leyden.engine.grammar_checker import GrammarChecker
from leyden.rendering.renderer import ChatRenderer, tool_call_texts
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.dialects.types import Format, GenerationRequest, ToolChoice
from leyden.server.gateway.errors import GatewayError, invalid

_WHITE = r"( |\n[ \t]{0,20})?"
"""White space between the parts of JSON, bounded so that an answer cannot consist of it."""
_MAX_SCHEMA = 1 << 17
"""The most characters of a schema."""
_MAX_MULTIPLE = 10_000
"""The largest `multipleOf`: the time and memory of its automaton grow with it."""
_PLAIN = {"TEXT": r"/(.|\n)+/", "WHITE": r"/\s{0,8}/"}
"""Rules of text without control tokens."""
_QUESTION = {"role": "user", "content": "?"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class _CallForm(NamedTuple):
    """How a model writes a tool call: two control tokens around JSON with the name and the arguments."""

    begin: int
    before_name: str
    before_arguments: str
    after_arguments: str
    end: int


class StructuredOutput:
    """Builds and checks the grammars of one model's answers."""

    def __init__(self, renderer: ChatRenderer, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._checker = GrammarChecker(tokenizer.control_json, vocabulary)
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self._think = [tokenizer.control_tokens.get(token) for token in ("<think>", "</think>")]

    async def grammar(self, wanted: Format, prompt_ids: Sequence[int], calls: bool, session: str = "") -> str:
        """Return the grammar of an answer to a prompt, with tool calls as an alternative; raise if there is none.

        A schema that cannot be enforced and is not strict is any JSON of its type, as in OpenAI's service.
        The grammars of one session are checked one after another.
        """
        if not self._answers_are_plain:
            message = "this model wraps its answers in a format that cannot be combined with another: request no format"
            raise invalid(message)
        rules = {
            "start": f"{self._reasoning(prompt_ids)} (json{' | calls' if calls else ''})",
            **({"calls": self._tool_calls} if calls else {}),
            **_PLAIN,
        }
        try:
            return await self._checked({**rules, "json": f"%json {_schema(wanted)}"}, session)
        except GatewayError:
            if wanted["type"] != "json_schema" or is_strict(wanted["json_schema"]):
                raise
            return await self._checked({**rules, "json": f"%json {_schema(_any_json(wanted))}"}, session)

    async def call_grammar(
        self, request: GenerationRequest, prompt_ids: Sequence[int], session: str = ""
    ) -> str | None:
        """Return the grammar of an answer whose tool calls are constrained to the tools of a request.

        With a required choice the answer is one or more calls, else text and calls; text alone if no tool may be
        called. The arguments of strict tools follow their schemas if those can be enforced, those of others are
        objects. None if there is nothing to constrain, or if the model's format of calls is not JSON between two
        control tokens.
        """
        form, choice = self._call_form, request.tool_choice
        tools = [tool["function"] for tool in request.callable_tools]
        required = choice.mode == "required"
        constrained = choice != ToolChoice() or any(map(is_strict, tools))
        if form is None or not request.tools or not constrained:
            return None
        if not tools:
            return await self._checked({"start": f"{self._reasoning(prompt_ids)} TEXT?", **_PLAIN}, session)
        if choice.name is not None:
            tools = [tool for tool in tools if tool["name"] == choice.name]
        reasoning = self._reasoning(prompt_ids)
        if request.parallel_tool_calls:
            start = f"{reasoning} call (WHITE call)*" if required else f"{reasoning} (TEXT | call)*"
        else:
            start = f"{reasoning} call" if required else f"{reasoning} TEXT? call?"
        try:
            return await self._checked({"start": start, **_call_rules(form, tools, strict=True)}, session)
        except GatewayError:  # a schema that cannot be enforced: calls of such tools are only validated
            return (
                await self._checked({"start": start, **_call_rules(form, tools, strict=False)}, session)
                if required
                else None
            )

    @property
    def can_constrain_calls(self) -> bool:
        """Whether a grammar can constrain this model's tool calls to the tools that are offered."""
        return self._call_form is not None

    async def _checked(self, rules: Mapping[str, str], session: str) -> str:
        """Return the grammar of these rules; raise if it cannot be enforced."""
        grammar = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
        try:
            await self._checker.check(grammar, self._renderer.get_stop_token_ids(), session)
        except GrammarError as error:
            raise _unsupported(str(error).rpartition("failed to compile JSON schema: ")[2]) from error
        return grammar

    @cached_property
    def _call_form(self) -> _CallForm | None:
        """Derive how the model writes a call from the one that its renderer writes."""
        ids = self._answer({"role": "assistant", "content": "", "tool_calls": [_CALL]}) or []
        marks = [at for at, id in enumerate(ids) if id in self._control_ids]
        if len(marks) < 2 or marks[0] != 0:
            return None
        inside = self._tokenizer.decode(ids[1 : marks[1]])
        before_name, name, rest = inside.partition('"f"')
        before_arguments, arguments, after_arguments = rest.partition("{}")
        if not name or not arguments or ids[marks[1]] in self._renderer.get_stop_token_ids():
            return None
        return _CallForm(ids[0], before_name, before_arguments, after_arguments, ids[marks[1]])

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
        raise invalid("this model's tool calls look like an answer in a format: send a format or tools, not both")

    def _answer(self, message: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens of an answer without its reasoning; None if the template changes the prompt."""
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


def is_strict(described: Mapping[str, Any]) -> bool:
    """Return whether the calls of a tool, or the answers in a format, have to follow its schema."""
    return described.get("strict") is True


def _any_json(wanted: Format) -> Format:
    """Return the format of any JSON of the type that a schema names, for one that cannot be enforced."""
    schema = wanted["json_schema"]["schema"]
    return {"type": "json_schema", "json_schema": {"schema": {"type": schema["type"]} if "type" in schema else {}}}


def _call_rules(form: _CallForm, tools: Sequence[Mapping[str, Any]], strict: bool) -> dict[str, str]:
    """Return the rules of a call of one of the tools."""
    calls = " | ".join(f"call_{at}" for at in range(len(tools)))
    rules = {"call": f"<[{form.begin}]> ({calls}) <[{form.end}]>", **_PLAIN}
    for at, tool in enumerate(tools):
        head = form.before_name + json.dumps(tool["name"], ensure_ascii=False) + form.before_arguments
        schema = tool.get("parameters") if strict and is_strict(tool) else None
        wanted: Format = {"type": "json_object"}
        if schema and isinstance(schema, dict):  # agents send any value
            wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
        rules[f"call_{at}"] = f"{json.dumps(head)} arguments_{at} {json.dumps(form.after_arguments)}"
        rules[f"arguments_{at}"] = f"%json {_schema(wanted)}"
    return rules


def _schema(wanted: Format) -> str:
    """Return the schema of a format; raise if it is too large."""
    schema = wanted["json_schema"]["schema"] if wanted["type"] == "json_schema" else {"type": "object"}
    try:
        text = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITE}})
        steps = [max(number.as_integer_ratio()) for number in _multiples(schema)]
    except RecursionError:
        raise _unsupported("its schema is nested too deep") from None
    if len(text) > _MAX_SCHEMA:
        raise _unsupported(f"its schema has {len(text)} characters, and may have {_MAX_SCHEMA}")
    # The largest first: the product of thousands of huge numbers takes minutes.
    if max(steps, default=0) > _MAX_MULTIPLE or ('"allOf"' in text and prod(steps) > _MAX_MULTIPLE):
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
    return invalid(f"the format of the answer cannot be enforced: {reason}")
