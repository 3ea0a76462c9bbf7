"""All the signals of an episode, in the order of its calls.

Each is a fact of its own: a call of an unknown tool that the agent answers with an error is `unknown_tool` and
`tool_failed`. Only of an answer that was cut nothing is said about what is missing of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from leyden.episodes import Episode
from leyden.records import Call, Span
from leyden.rl.signals.malformed import unreadable_call
from leyden.rl.signals.repetition import repeated
from leyden.rl.signals.schemas import broken
from leyden.rl.signals.signal import Fact, Signal, SignalKind
from leyden.rl.signals.tool_calls import ObservedToolCall, ToolResult, answers, results, tool_calls_of
from leyden.rl.signals.tool_endings import ending
from leyden.rl.signals.tool_spans import joined

Schemas = dict[str, Any]

_CUT = "length"


class _Use(Struct, frozen=True):
    """A tool call, and what is known of what came of it."""

    made: ObservedToolCall
    result: ToolResult | None
    span: Span | None
    again: bool


def find(episode: Episode) -> list[Signal]:
    """What the record of an episode shows by itself. Calls that are not trained on have signals too."""
    said = [(call, message, tool_calls_of(call, message)) for call, message in answers(episode)]
    asked = [made for _, _, calls in said for made in calls]
    shown, ran, offered = results(episode, asked), joined(asked, episode.spans), _offered(episode)
    again = repeated(episode, asked, shown)
    uses = iter([_Use(made, shown.get(at), ran.get(at), at in again) for at, made in enumerate(asked)])
    return [
        signal
        for call, message, calls in said
        for signal in _signals(episode, call, message, [next(uses) for _ in calls], offered[call.id])
    ]


def _signals(
    episode: Episode, call: Call, message: dict[str, Any], uses: Sequence[_Use], tools: Schemas | None
) -> Iterator[Signal]:
    """The signals of one answer: its own, then those of each of its tool calls."""
    role = episode.role(call)
    for kind, why in _of_answer(call, message, tools):
        yield Signal(kind, call, why, role)
    for use in uses:
        facts = [*_of_tool_call(call, use, tools), ending(use.result, use.span)]
        if use.again:
            facts.append((SignalKind.REPEATED_CALL, "the same call was made before, and nothing has changed since"))
        for kind, why in filter(None, facts):
            yield Signal(
                kind=kind,
                call=call,
                why=why,
                role=role,
                place=use.made.place,
                tool_call=use.made.id,
                tool=use.made.name,
                arguments=use.made.arguments,
                result=use.result.text if use.result is not None else None,
                span=use.span,
            )


def _of_answer(call: Call, message: dict[str, Any], tools: Schemas | None) -> Iterator[Fact]:
    text = message.get("content")
    text = text if isinstance(text, str) else ""
    if call.finish == _CUT:
        yield SignalKind.CUT, "the length limit ended it"
    elif tools and (tried := unreadable_call(text)) is not None:
        yield SignalKind.MALFORMED_CALL, f"it tries a tool call that cannot be read: {tried}"
    elif not text.strip() and not message.get("tool_calls"):
        yield SignalKind.EMPTY_ANSWER, "it has neither text nor a tool call"


def _of_tool_call(call: Call, use: _Use, tools: Schemas | None) -> Iterator[Fact]:
    name, arguments = use.made.name, use.made.arguments
    if tools is not None and name not in tools:
        offered = ", ".join(tools) or "none"
        yield SignalKind.UNKNOWN_TOOL, f"the tools offered are: {offered}"
    if isinstance(arguments, str):
        if call.finish != _CUT:
            yield SignalKind.MALFORMED_CALL, f"its arguments are no JSON object: {arguments}"
    elif tools is not None and (how := broken(arguments, tools.get(name))) is not None:
        yield SignalKind.BAD_ARGUMENTS, f"its arguments break the tool's schema: {how}"


def _offered(episode: Episode) -> dict[str, Schemas | None]:
    """By call, the schemas of the tools that were offered, by name; None where the record does not say which were."""
    offered: dict[str, Schemas | None] = {}
    for call in episode.calls:  # a parent is recorded before its child
        if call.tools is None:
            offered[call.id] = offered[call.parent] if call.parent is not None else None
            continue
        named = offered[call.id] = dict[str, Any]()
        for tool in call.tools:
            match tool:
                case {"function": {"name": str(name), **more}}:
                    named[name] = more.get("parameters")
    return offered
