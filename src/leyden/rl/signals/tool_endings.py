"""How a tool call ended, by all that is known of it.

A span that ended with an error, or a result that the agent marked as one, is a failure. A span that ended well
outweighs the text of the result; where that says for sure that the tool failed, the two contradict each other, and
nothing is said.
"""

from leyden.records import Span
from leyden.rl.signals.signal import Fact, SignalKind
from leyden.rl.signals.tool_calls import ToolResult
from leyden.rl.signals.tool_results import failed
from leyden.rl.signals.tool_spans import raised


def ending(result: ToolResult | None, span: Span | None) -> Fact | None:
    """Whether a tool failed or succeeded, and how that is known; None where it is not."""
    error = raised(span) if span is not None else None
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
            return SignalKind.TOOL_SUCCEEDED, "its result is no error"
        case False | None, Span():
            return SignalKind.TOOL_SUCCEEDED, "its span ended without an error"
    return None
