"""The current attempt, kept in OpenTelemetry's context: the attempt's trace and the baggage `leyden.attempt`.

asyncio tasks inherit the context. `propagation` carries it into requests, threads and processes.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar

from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

ATTEMPT = "leyden.attempt"

_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])  # independent of OTEL_PROPAGATORS

span_finders: list[Callable[[], trace.Span | None]] = []
"""Return the current span of frameworks that do not set OpenTelemetry's current span."""


def attempt_context(attempt: str, traceparent: str) -> contextvars.Context:
    """Create the context in which to run an attempt."""
    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, context.Context())
    created = contextvars.copy_context()
    created.run(context.attach, baggage.set_baggage(ATTEMPT, attempt, parent))
    created.run(current_node.set, LatestCall())
    return created


def current_attempt(within: context.Context | None = None) -> str | None:
    """Return the attempt of the current context, or of another."""
    attempt = baggage.get_baggage(ATTEMPT, within)
    return attempt if isinstance(attempt, str) else None


def current_span() -> trace.Span:
    """Return the innermost span: OpenTelemetry's or a framework's, whichever started last."""
    span = trace.get_current_span()
    for find in span_finders:
        other = find()
        if other is not None and _start_ns(other) > _start_ns(span):
            span = other
    return span


def _start_ns(span: trace.Span) -> int:
    return getattr(span, "start_time", None) or 0  # the attempt's own span is remote and has none


def inject(headers: MutableMapping[str, str]) -> None:
    """Add the current attempt and span to headers, without replacing what they hold."""
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


class LatestCall:
    """The latest model call of one task or thread, so that a step reward goes to the right call.

    An agent may make calls concurrently. Every task and thread has a node whose parent is the node of its creator. A
    call becomes the latest call of its node and of all ancestors, but not of concurrent tasks.
    """

    __slots__ = ("call", "owner", "parent")

    def __init__(self, parent: "LatestCall | None" = None, owner: int | None = None) -> None:
        self.parent, self.owner = parent, owner
        self.call: str | None = None


current_node: ContextVar[LatestCall | None] = ContextVar("leyden-latest-call", default=None)
"""The node of this context, or that of its creator; `owner` tells which."""


def record_call(call: str) -> None:
    """Set the latest call of the current task or thread."""
    owner, node = _owner(), current_node.get()
    if node is None or node.owner != owner:
        node = LatestCall(node, owner)
        current_node.set(node)
    ancestor: LatestCall | None = node
    while ancestor is not None:
        ancestor.call = call
        ancestor = ancestor.parent


def latest_call() -> str | None:
    """Return the latest call of the current task or thread, or of the nearest ancestor that made one."""
    node = current_node.get()
    while node is not None and node.call is None:
        node = node.parent
    return node.call if node is not None else None


def _owner() -> int:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no running event loop
        task = None
    return threading.get_ident() if task is None else id(task)
