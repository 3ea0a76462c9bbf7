"""Attributes tools that an agent's own code ran to the answers that made it run them.

An agent that parses answers itself (a query, code, ReAct text) runs tools that no answer called by name. Such a tool
belongs to the answer before it: that of the call whose span was the last to end when the tool started. A tool that
started while another call was open belongs to none, because the agent does several things at once.
"""

from collections.abc import Iterable

from leyden.episodes import Episode
from leyden.records import Call, Span


def attribute_spans(episode: Episode, spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return the spans of tools that no answer called, by the id of the call that they belong to."""
    by_id = {span.span_id: span for span in episode.spans}
    calls = [(call, by_id.get(call.span or "")) for call in episode.calls]
    found: dict[str, list[Span]] = {}
    for tool in spans:
        call = _call_before(tool, calls)
        if call is not None:
            found.setdefault(call.id, []).append(tool)
    return found


def _call_before(tool: Span, calls: Iterable[tuple[Call, Span | None]]) -> Call | None:
    """Return the call before a tool; None if the record does not show which one that is."""
    last, last_end = None, -1
    for call, span in calls:
        if span is None or span.start_ns <= tool.start_ns < span.end_ns:
            return None
        if last_end <= span.end_ns <= tool.start_ns:
            last, last_end = call, span.end_ns
    return last
