"""Exports the spans of attempts to the server over OTLP, in batches; all spans of an attempt when it is flushed.

If the agent sets a tracer provider, a processor is added to it; otherwise a provider is created. An attempt without
spans has no overhead.
"""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Status, StatusCode

from leyden.client.tracing.context import ATTEMPT, current_attempt

_log = logging.getLogger("leyden.host")
_BATCH_SIZE = 256
_MAX_DELAY_S = 1.0
_MAX_WAITING = 1 << 20
"""Spans that wait for their export; what comes beyond is dropped."""
_EXPORT_TIMEOUT_S = 30.0
_MAX_ATTRIBUTE_LENGTH = 16_384
"""Characters. Otherwise every span of a graph's nodes would hold the whole state twice."""


class AttemptSpanProcessor(SpanProcessor):
    """Collects the ended spans of attempts from all providers, and exports them in a background thread.

    It goes on when an agent shuts its own provider down: later attempts have spans, too.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._batches = BatchSpanProcessor(exporter, _MAX_WAITING, 1e3 * _MAX_DELAY_S, _BATCH_SIZE)
        self._flushing = ThreadPoolExecutor(1, thread_name_prefix="leyden-spans")
        self._lock = threading.Lock()
        self._open: dict[str, dict[int, Span]] = {}
        """By attempt and span id."""
        self._ended: Counter[str] = Counter()
        """Ended spans by attempt that may not be exported yet: they are flushed when the attempt ends."""

    def on_start(self, span: Span, parent_context: context.Context | None = None) -> None:
        """Mark the span with its attempt, because a framework may start a trace without the attempt's baggage."""
        attempt = current_attempt(parent_context) or current_attempt()
        if attempt is not None:
            span.set_attribute(ATTEMPT, attempt)
            with self._lock:
                self._open.setdefault(attempt, {})[span.context.span_id] = span

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span for export, if it belongs to an attempt."""
        attempt = (span.attributes or {}).get(ATTEMPT)
        if not isinstance(attempt, str) or not span.context:
            return
        self._batches.on_end(span)
        with self._lock:
            self._close(attempt, span.context.span_id)
            if span.context.trace_flags.sampled:
                self._ended[attempt] += 1

    def end_open(self, attempt: str) -> None:
        """End the open spans of an attempt with an error. They show what it was doing when it was stopped."""
        with self._lock:
            spans = list(self._open.pop(attempt, {}).values())
        for span in reversed(spans):
            span.set_status(Status(StatusCode.ERROR, "the attempt was stopped before this span ended"))
            span.end()

    def _close(self, attempt: str, span_id: int) -> None:
        spans = self._open.get(attempt)
        if spans is not None:
            spans.pop(span_id, None)
            if not spans:
                del self._open[attempt]

    def drop_open(self, attempt: str) -> bool:
        """Drop the open spans of an attempt; return whether it has ended ones, which must be flushed."""
        with self._lock:
            self._open.pop(attempt, None)
            return attempt in self._ended

    def flush(self, attempt: str) -> Future[None] | None:
        """Export an attempt's ended spans now; None if there are none."""
        with self._lock:
            return self._flushing.submit(self._flush, attempt) if attempt in self._ended else None

    def _flush(self, attempt: str) -> None:
        with self._lock:
            exported = Counter({attempt: self._ended[attempt]})
        self._batches.force_flush()
        with self._lock:
            self._ended -= exported


class SpanExport:
    """Sets up OpenTelemetry in a host. Created before the agent is loaded; `provide` is called afterwards."""

    def __init__(self, server: str, key: str) -> None:
        self.processor = AttemptSpanProcessor(_LazyExporter(server, key))
        self._providers: list[Any] = []
        self._own: TracerProvider | None = None
        self._set_provider = trace.set_tracer_provider
        trace.set_tracer_provider = self._on_set_provider  # type: ignore[assignment]  # a hook

    def provide(self) -> None:
        """Set a tracer provider, unless the agent has set one."""
        existing = trace.get_tracer_provider()
        if not isinstance(existing, trace.ProxyTracerProvider):
            self._attach(existing)
            return
        limits = SpanLimits(max_attribute_length=_MAX_ATTRIBUTE_LENGTH)
        self._own = TracerProvider(resource=Resource({"service.name": "agent"}), span_limits=limits)
        self._attach(self._own)
        self._set_provider(self._own)

    def _on_set_provider(self, provider: trace.TracerProvider) -> None:
        """Handle a provider set by the agent. It may replace ours, which OpenTelemetry would not allow."""
        self._attach(provider)
        if self._own is not None and trace.get_tracer_provider() is self._own:
            trace._TRACER_PROVIDER = provider
        else:
            self._set_provider(provider)

    def _attach(self, provider: Any) -> None:
        if hasattr(provider, "add_span_processor") and not any(provider is known for known in self._providers):
            self._providers.append(provider)
            provider.add_span_processor(self.processor)


class _LazyExporter(SpanExporter):
    """OTLP exporter that is imported with the first spans, because the import is slow and most hosts have none."""

    def __init__(self, server: str, key: str) -> None:
        self._server, self._key = server, key
        self._exporter: SpanExporter | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            headers = {"authorization": f"Bearer {self._key}"}
            self._exporter = OTLPSpanExporter(f"{self._server}/v1/traces", headers=headers, timeout=_EXPORT_TIMEOUT_S)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            _log.warning("%d spans could not be exported: the server was unreachable or refused them", len(spans))
        return result
