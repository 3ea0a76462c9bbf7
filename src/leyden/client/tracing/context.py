"""For which attempt code is running, and how what it sends says so.

Identity is OpenTelemetry's context: the attempt's trace and the baggage `leyden.attempt`. It follows tasks by itself;
carrying.py takes it everywhere else.
"""

import contextvars
from collections.abc import Callable, MutableMapping

from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from leyden.client.tracing import latest_call

ATTEMPT = "leyden.attempt"

_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])  # whatever OTEL_PROPAGATORS says

span_finders: list[Callable[[], trace.Span | None]] = []
"""Where the spans of frameworks are found that do not make them OpenTelemetry's current ones."""


def context_of(attempt: str, traceparent: str) -> contextvars.Context:
    """A context to run an attempt in."""
    carried = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, context.Context())
    made = contextvars.copy_context()
    made.run(context.attach, baggage.set_baggage(ATTEMPT, attempt, carried))
    made.run(latest_call.current.set, latest_call.LatestCall())
    return made


def current_attempt(within: context.Context | None = None) -> str | None:
    """The attempt that code is running for, here or within another context."""
    attempt = baggage.get_baggage(ATTEMPT, within)
    return attempt if isinstance(attempt, str) else None


def current_span() -> trace.Span:
    """The innermost span here: OpenTelemetry's or a framework's, whichever began last."""
    span = trace.get_current_span()
    for find in span_finders:
        other = find()
        if other is not None and _began(other) > _began(span):
            span = other
    return span


def _began(span: trace.Span) -> int:
    return getattr(span, "start_time", None) or 0  # that of the attempt itself began elsewhere


def sign(headers: MutableMapping[str, str]) -> None:
    """Say in headers for which attempt a request is made, and within which span, beside what they say already."""
    if current_attempt() is None:
        return
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(current_span()) if span_finders else None)
    for name, value in carrier.items():
        present = headers.get(name)
        if present is None:
            headers[name] = value
        elif name == "baggage" and ATTEMPT not in present:
            headers[name] = f"{present},{value}"
