"""Decides whether a tool call failed or succeeded.

A span with an error, or a result that the agent marked as an error, is a failure. A span without an error outweighs a
text that only resembles one. If the text is certainly an error and the span has none, they contradict each other, and
there is no signal.
"""

from leyden.records import Span
from leyden.rl.signals.signal import Evidence, SignalKind
from leyden.rl.signals.tool_calls import ToolResult
from leyden.rl.signals.tool_results import failed
from leyden.rl.signals.tool_spans import span_error


def ending(result: ToolResult | None, span: Span | None) -> Evidence | None:
    """Return whether a tool failed or succeeded, and why; None if it is not known."""
    error = span_error(span) if span is not None else None
    if error is not None:
        return SignalKind.TOOL_FAILED, f"its span ended with an error: {error}"
    if result is None:
        return (SignalKind.TOOL_SUCCEEDED, "its span ended without an error") if span is not None else None
    if result.error:
        return SignalKind.TOOL_FAILED, f"its result is marked as an error: {result.text}"
    match failed(result.text), span:
        case True, None:
            return SignalKind.TOOL_FAILED, f"its result is an error: {result.text}"
        case False, None:
            return SignalKind.TOOL_SUCCEEDED, "its result is not an error"
        case False | None, Span():
            return SignalKind.TOOL_SUCCEEDED, "its span ended without an error"
    return None
