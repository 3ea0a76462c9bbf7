"""For which attempt code is running, and how its outgoing requests say so.

Identity is OpenTelemetry's context: the attempt's trace and the baggage `leyden.attempt`. It follows tasks by itself,
threads by a hook here, and another hook puts it on every request of httpx and httpx2. OpenTelemetry's instrumentations
may stand beside these but could not replace them: they send nothing where a framework suppresses tracing.
"""

import contextvars
import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from opentelemetry import baggage, context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

ATTEMPT = "leyden.attempt"

_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])  # whatever OTEL_PROPAGATORS says


def context_of(attempt: str, traceparent: str) -> contextvars.Context:
    """A context to run an attempt in."""
    carried = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, context.Context())
    made = contextvars.copy_context()
    made.run(context.attach, baggage.set_baggage(ATTEMPT, attempt, carried))
    return made


def sign(headers: MutableMapping[str, str]) -> None:
    """Say in a request's headers for which attempt it is made, beside what they say already."""
    if baggage.get_baggage(ATTEMPT) is None:
        return
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    for name, value in carrier.items():
        present = headers.get(name)
        if present is None:
            headers[name] = value
        elif name == "baggage" and ATTEMPT not in present:
            headers[name] = f"{present},{value}"


def install() -> None:
    """Hook into this process; before the agent's modules are imported, which may keep what they find."""
    for name in ("httpx", "httpx2"):
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            _sign_sent(module.Client)
            _sign_sent(module.AsyncClient)
    _carry_into_threads()
    _carry_into_pools()


def _sign_sent(client: Any) -> None:
    """Both kinds of client take the request first; for the async one this runs as the coroutine is made."""
    send = client.send

    @functools.wraps(send)
    def signed(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        sign(request.headers)
        return send(self, request, *args, **kwargs)

    client.send = signed


def _carry_into_threads() -> None:
    start = threading.Thread.start

    @functools.wraps(start)
    def carried(self: threading.Thread) -> None:
        current = context.get_current()
        if baggage.get_baggage(ATTEMPT, current) is not None:
            self.run = functools.partial(_run_in, current, self.run)  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = carried  # type: ignore[method-assign]


def _carry_into_pools() -> None:
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    @functools.wraps(submit)
    def carried(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return submit(self, _run_in, context.get_current(), fn, *args, **kwargs)

    ThreadPoolExecutor.submit = carried  # type: ignore[method-assign,assignment]


def _run_in(current: context.Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = context.attach(current)
    try:
        return function(*args, **kwargs)
    finally:
        context.detach(token)
