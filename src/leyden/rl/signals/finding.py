"""Finds all signals of an episode, in the order of its calls.

Signals are independent: a call of an unknown tool that is answered with an error is `unknown_tool` and `tool_failed`.
An answer that was cut off is not also malformed or empty, because the missing part is unknown.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from leyden.episodes import Episode
from leyden.records import Call, Span
from leyden.rl.signals.repetition import repeated
from leyden.rl.signals.schemas import CheckTime, check
from leyden.rl.signals.signal import Evidence, Signal, SignalKind
from leyden.rl.signals.tool_calls import ObservedToolCall, ToolResult, answers, results, tool_calls_of
from leyden.rl.signals.tool_results import ending
from leyden.rl.signals.tool_spans import match_spans, tool_arguments, tool_name, tool_spans

_MARKER = re.compile(
    r"(?<![`'\"])(?:"
    r"</?tool_calls?>|<\|tool_call>|<minimax:tool_call>|<function=|\[TOOL_CALLS\]|"
    r"<\|tool_call_begin\|>|<\|tool_calls_section_begin\|>|<｜tool▁calls?▁begin｜>|<｜DSML｜|"
    r"<\|python_tag\|>|<\|content_invoke_tool_(?:json|text)\|>|\bto=functions\."
    r")"
)
Schemas = dict[str, Any]
_LENGTH = "length"
"""The finish reason of an answer that was cut off."""
_CHECK_S = 1.0
"""CPU time for the schemas of an episode: those of most take milliseconds, and a hostile one must not take longer."""


class _Execution(Struct, frozen=True):
    """A tool call with its result and span, if they are known."""

    tool_call: ObservedToolCall
    result: ToolResult | None
    span: Span | None
    repeated: bool


def find(episode: Episode) -> list[Signal]:
    """Find the signals of an episode, including those of calls that are not trained on."""
    answered = [(call, message, tool_calls_of(call, message)) for call, message in answers(episode)]
    tool_calls = [tool_call for _, _, calls in answered for tool_call in calls]
    results_by_index, spans_by_index = results(episode, tool_calls), match_spans(tool_calls, episode.spans)
    repetitions = repeated(episode, tool_calls, results_by_index)
    offered, allowed = _offered(episode), CheckTime(_CHECK_S)
    matched = {span.span_id for span in spans_by_index.values()}
    own = attribute_spans(episode, (span for span in tool_spans(episode.spans) if span.span_id not in matched))
    executions = iter(
        [
            _Execution(tool_call, results_by_index.get(index), spans_by_index.get(index), index in repetitions)
            for index, tool_call in enumerate(tool_calls)
        ]
    )
    return [
        signal
        for call, message, calls in answered
        for signal in (
            *_signals(episode, call, message, [next(executions) for _ in calls], offered[call.id], allowed),
            *_of_agents_tools(episode, call, own.get(call.id, ()) if not calls else ()),
        )
    ]


def _signals(
    episode: Episode,
    call: Call,
    message: dict[str, Any],
    executions: Sequence[_Execution],
    tools: Schemas | None,
    allowed: CheckTime,
) -> Iterator[Signal]:
    """Yield the signals of one answer: of the answer as a whole, then of each of its tool calls."""
    role = episode.role(call)
    for kind, why in _of_answer(call, message, tools):
        yield Signal(kind, call, why, role)
    for execution in executions:
        found = [*_of_tool_call(call, execution, tools, allowed), ending(execution.result, execution.span)]
        if execution.repeated:
            found.append((SignalKind.REPEATED_CALL, "the same call was made before, and nothing has changed since"))
        for kind, why in filter(None, found):
            yield Signal(
                kind=kind,
                call=call,
                why=why,
                role=role,
                position=execution.tool_call.position,
                tool_call=execution.tool_call.id,
                tool=execution.tool_call.name,
                arguments=execution.tool_call.arguments,
                result=execution.result.text if execution.result is not None else None,
                span=execution.span,
            )


def _of_agents_tools(episode: Episode, call: Call, spans: Sequence[Span]) -> Iterator[Signal]:
    """Yield how the tools ended that the agent's code ran after an answer without tool calls."""
    for position, span in enumerate(spans, 1):
        if (found := ending(None, span)) is not None:
            yield Signal(
                kind=found[0],
                call=call,
                why=found[1],
                role=episode.role(call),
                position=position,
                tool=tool_name(span),
                arguments=tool_arguments(span),
                span=span,
            )


def _of_answer(call: Call, message: dict[str, Any], tools: Schemas | None) -> Iterator[Evidence]:
    text = message.get("content")
    text = text if isinstance(text, str) else ""
    if call.finish == _LENGTH:
        yield SignalKind.CUT, "the length limit ended the answer"
    elif tools and (attempted := unreadable_call(text)) is not None:
        yield SignalKind.MALFORMED_CALL, f"the answer has a tool call that cannot be parsed: {attempted}"
    elif not text.strip() and not message.get("tool_calls"):
        yield SignalKind.EMPTY_ANSWER, "the answer has neither text nor a tool call"


def _of_tool_call(call: Call, execution: _Execution, tools: Schemas | None, allowed: CheckTime) -> Iterator[Evidence]:
    name, arguments = execution.tool_call.name, execution.tool_call.arguments
    if tools is not None and name not in tools:
        offered = ", ".join(tools) or "none"
        yield SignalKind.UNKNOWN_TOOL, f"the tools offered are: {offered}"
    if isinstance(arguments, str):
        if call.finish != _LENGTH:
            yield SignalKind.MALFORMED_CALL, f"its arguments are not a JSON object: {arguments}"
    elif execution.tool_call.malformed is not None and call.finish != _LENGTH:
        yield SignalKind.MALFORMED_CALL, f"the call cannot be parsed: {execution.tool_call.malformed}"
    elif tools is not None and (error := check(arguments, tools.get(name), allowed).error) is not None:
        yield SignalKind.BAD_ARGUMENTS, f"its arguments break the tool's schema: {error}"


def _offered(episode: Episode) -> dict[str, Schemas | None]:
    """Return, by call, the schemas of the offered tools by name; None if the record does not have them."""
    offered: dict[str, Schemas | None] = {}
    for call in episode.calls:  # a parent is recorded before its child
        known = offered[call.parent] if call.tools is None and call.parent is not None else None
        loaded = [tool for message in call.messages for tool in _loaded(message)]
        if call.tools is None and (known is None or not loaded):
            offered[call.id] = known
            continue
        schemas = offered[call.id] = dict(known or {})
        for tool in (*(call.tools or ()), *loaded):
            match tool:
                case {"function": {"name": str(name), **rest}}:
                    schemas[name] = rest.get("parameters")
    return offered


def _loaded(message: Any) -> Sequence[Any]:
    """Return the deferred tools that a tool's result shows to the model."""
    match message:
        case {"loaded_tools": list() | tuple() as tools}:
            return tools
    return ()


def attribute_spans(episode: Episode, spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return the spans of tools that no answer called, by the id of the call that they belong to.

    An agent that parses answers itself (a query, code, ReAct text) runs such tools. A tool belongs to the answer before
    it: that of the call whose span was the last to end when the tool started. One that started while another call was
    open belongs to none, because the agent does several things at once.
    """
    by_id = {span.span_id: span for span in episode.spans}
    calls = [(call, by_id.get(call.span or "")) for call in episode.calls]
    found: dict[str, list[Span]] = {}
    for tool in spans:
        call = _call_before(tool, calls)
        if call is not None:
            found.setdefault(call.id, []).append(tool)
    return found


def _call_before(tool: Span, calls: Iterable[tuple[Call, Span | None]]) -> Call | None:
    """Return the call before a tool; None if the record leaves that open."""
    last, last_end = None, -1
    for call, span in calls:
        if span is None or span.start_ns <= tool.start_ns < span.end_ns:
            return None
        if last_end <= span.end_ns <= tool.start_ns:
            last, last_end = call, span.end_ns
    return last


def unreadable_call(text: str) -> str | None:
    """Return a tool call that the gateway could not parse and left in the text, from its first marker on, if any."""
    found = _MARKER.search(text)
    return text[found.start() :] if found else None
