"""Spans in which tools ran, joined with the tool calls that they ran for.

By the id of the tool call where a span has it, else by tool and arguments, else by tool and order where just as many
ran as were called. What cannot be joined without doubt is left alone.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec

from leyden.records import Span
from leyden.rl.signals.tool_calls import ObservedToolCall, key_of

_IDS = ("gen_ai.tool.call.id", "tool_call.id", "tool.id")
_NAMES = ("gen_ai.tool.name", "tool.name")


def joined(asked: Sequence[ObservedToolCall], spans: Sequence[Span]) -> dict[int, Span]:
    """The span of each tool call that has one, by its index."""
    found: dict[int, Span] = {}
    left = _tool_spans(spans)
    ways: tuple[tuple[Callable[[Span], Hashable], Callable[[ObservedToolCall], Hashable], bool], ...] = (
        (_id, lambda made: made.id, False),
        (_key, lambda made: made.key, False),
        (_name, lambda made: made.name, True),
    )
    for of_span, of_call, all_of_them in ways:
        calls: dict[Hashable, list[int]] = {}
        for index, made in enumerate(asked):
            if index not in found:
                calls.setdefault(of_call(made), []).append(index)
        ran: dict[Hashable, list[Span]] = {}
        for span in left:
            if (key := of_span(span)) in calls:
                ran.setdefault(key, []).append(span)
        for key, those in ran.items():
            if len(those) == len(calls[key]) or (len(those) < len(calls[key]) and not all_of_them):
                found.update(zip(calls[key], those, strict=False))
        taken = {span.span_id for span in found.values()}
        left = [span for span in left if span.span_id not in taken]
    return found


def raised(span: Span) -> str | None:
    """The error with which a tool's span ended; None where it ended well."""
    message = _message(span)
    if message.get("status") == "error":
        return str(message.get("content"))
    if span.status == "ok":  # what it caught on the way does not matter
        return None
    caught = [event["attributes"].get("exception.message", "") for event in span.events if event["name"] == "exception"]
    kind = span.attributes.get("error.type")
    if span.status == "unset" and kind is None and not caught:
        return None
    return span.status_message or str(next(reversed(caught), None) or kind or "it does not say which")


def _tool_spans(spans: Sequence[Span]) -> list[Span]:
    """Those in which a tool ran, in order; where two instrumentations saw one run, the outer span."""
    by_id = {span.span_id: span for span in spans}

    def within_its_like(span: Span) -> bool:
        name, seen = _name(span), {span.span_id}
        parent = by_id.get(span.parent_id or "")
        while parent is not None and parent.span_id not in seen:
            if _is_tool(parent) and _name(parent) == name:
                return True
            seen.add(parent.span_id)
            parent = by_id.get(parent.parent_id or "")
        return False

    return sorted((s for s in spans if _is_tool(s) and not within_its_like(s)), key=lambda span: span.start_ns)


def _is_tool(span: Span) -> bool:
    said = span.attributes
    return said.get("openinference.span.kind") == "TOOL" or said.get("gen_ai.operation.name") == "execute_tool"


def _id(span: Span) -> str | None:
    said = (span.attributes.get(name) for name in _IDS)
    return next((id for id in (*said, _message(span).get("tool_call_id")) if isinstance(id, str)), None)


def _name(span: Span) -> str:
    said = (span.attributes.get(name) for name in _NAMES)
    return next((name for name in said if isinstance(name, str)), span.name)


def _key(span: Span) -> tuple[str, bytes] | None:
    for name in ("gen_ai.tool.call.arguments", "input.value"):
        given = _object(span.attributes.get(name))
        if given is not None:
            return key_of(_name(span), given)
    return None


def _message(span: Span) -> dict[str, Any]:
    """The message that a tool of LangChain ended with: it has the call's id, and how it went."""
    data = (_object(span.attributes.get("output.value")) or {}).get("data")
    return data if isinstance(data, dict) and "tool_call_id" in data else {}


def _object(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return None
    return value if isinstance(value, dict) else None
