"""Matches the spans in which tools ran to the tool calls of an episode.

A span is matched by the id of the tool call; if it has none, by tool and arguments; otherwise by tool and order, if
there are as many spans as calls of that tool. Ambiguous spans are not matched.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from leyden.decoding import decode_object
from leyden.records import Span
from leyden.rl.signals.tool_calls import ObservedToolCall, key_of

_IDS = ("gen_ai.tool.call.id", "tool_call.id", "tool.id")
_NAMES = ("gen_ai.tool.name", "tool.name")


def match_spans(tool_calls: Sequence[ObservedToolCall], spans: Sequence[Span]) -> dict[int, Span]:
    """Return the spans of tool calls by index."""
    found: dict[int, Span] = {}
    unmatched = tool_spans(spans)
    matchers: tuple[tuple[Callable[[Span], Hashable], Callable[[ObservedToolCall], Hashable], bool], ...] = (
        (_id, lambda tool_call: tool_call.id, False),
        (_key, lambda tool_call: tool_call.key, False),
        (tool_name, lambda tool_call: tool_call.name, True),
    )
    for span_key, call_key, needs_all in matchers:
        calls: dict[Hashable, list[int]] = {}
        for index, tool_call in enumerate(tool_calls):
            if index not in found:
                calls.setdefault(call_key(tool_call), []).append(index)
        spans_by_key: dict[Hashable, list[Span]] = {}
        for span in unmatched:
            if (key := span_key(span)) in calls:
                spans_by_key.setdefault(key, []).append(span)
        for key, candidates in spans_by_key.items():
            if len(candidates) == len(calls[key]) or (len(candidates) < len(calls[key]) and not needs_all):
                found.update(zip(calls[key], candidates, strict=False))
        matched = {span.span_id for span in found.values()}
        unmatched = [span for span in unmatched if span.span_id not in matched]
    return found


def span_error(span: Span) -> str | None:
    """Return the error with which a tool's span ended; None if it ended without one."""
    message = _message(span)
    if message.get("status") == "error":
        return str(message.get("content"))
    if span.status == "ok":  # exceptions that it caught do not matter
        return None
    caught = [event["attributes"].get("exception.message", "") for event in span.events if event["name"] == "exception"]
    kind = span.attributes.get("error.type")
    if span.status == "unset" and kind is None and not caught:
        return None
    return span.status_message or str(next(reversed(caught), None) or kind or "unknown")


def tool_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of tools by start time; if two instrumentations recorded one execution, only the outer span."""
    by_id = {span.span_id: span for span in spans}

    def is_nested(span: Span) -> bool:
        name, seen = tool_name(span), {span.span_id}
        parent = by_id.get(span.parent_id or "")
        while parent is not None and parent.span_id not in seen:
            if _is_tool(parent) and tool_name(parent) == name:
                return True
            seen.add(parent.span_id)
            parent = by_id.get(parent.parent_id or "")
        return False

    return sorted((s for s in spans if _is_tool(s) and not is_nested(s)), key=lambda span: span.start_ns)


def _is_tool(span: Span) -> bool:
    kind, operation = (span.attributes.get(name) for name in ("openinference.span.kind", "gen_ai.operation.name"))
    return kind == "TOOL" or operation == "execute_tool"


def _id(span: Span) -> str | None:
    ids = (span.attributes.get(name) for name in _IDS)
    return next((id for id in (*ids, _message(span).get("tool_call_id")) if isinstance(id, str)), None)


def tool_name(span: Span) -> str:
    """Return the name of the tool that ran in a span."""
    names = (span.attributes.get(name) for name in _NAMES)
    return next((name for name in names if isinstance(name, str)), span.name)


def tool_arguments(span: Span) -> dict[str, Any] | None:
    """Return the arguments of the tool that ran in a span, if they are a JSON object."""
    found = (_object(span.attributes.get(name)) for name in ("gen_ai.tool.call.arguments", "input.value"))
    return next((arguments for arguments in found if arguments is not None), None)


def _key(span: Span) -> tuple[str, bytes] | None:
    arguments = tool_arguments(span)
    return key_of(tool_name(span), arguments) if arguments is not None else None


def _message(span: Span) -> dict[str, Any]:
    """Return the message of a LangChain tool, which has the id of the call and its status."""
    data = (_object(span.attributes.get("output.value")) or {}).get("data")
    return data if isinstance(data, dict) and "tool_call_id" in data else {}


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else decode_object(value)
