"""The spans of attempts on their way to the server: over OTLP, in batches, all of an attempt's before it ends.

A provider that the agent sets up is joined, not replaced; where it sets up none there is one of ours. An attempt
without spans costs nothing here.
"""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Status, StatusCode

from leyden.client.tracing.context import ATTEMPT, current_attempt

_log = logging.getLogger("leyden.host")
_BATCH = 256
_LONGEST_WAIT_S = 1.0
_EXPORT_S = 30.0
_LONGEST_ATTRIBUTE = 16_384
"""Characters: a graph's whole state would otherwise be in every span of its nodes, twice."""


class AttemptSpanProcessor(SpanProcessor):
    """Collects the ended spans of attempts, whichever provider made them, and sends them from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._changed = threading.Condition()
        self._ended: list[ReadableSpan] = []
        self._open: dict[str, dict[int, Span]] = {}
        """By attempt and by the id of the span."""
        self._unsent: Counter[str] = Counter()
        """How many spans of each attempt are not with the server."""
        self._sent: Future[None] = Future()
        """Done when all that has ended before now is sent, or given up."""
        self._urgent = False
        self._thread: threading.Thread | None = None

    def on_start(self, span: Span, parent_context: context.Context | None = None) -> None:
        """Say whose it is: a framework may have begun a trace of its own, without the attempt's baggage."""
        attempt = current_attempt(parent_context) or current_attempt()
        if attempt is not None:
            span.set_attribute(ATTEMPT, attempt)
            with self._changed:
                self._open.setdefault(attempt, {})[span.context.span_id] = span

    def on_end(self, span: ReadableSpan) -> None:
        """Take it along, if it is an attempt's."""
        attempt = (span.attributes or {}).get(ATTEMPT)
        if not isinstance(attempt, str) or not span.context:
            return
        with self._changed:
            self._close(attempt, span.context.span_id)
            if not span.context.trace_flags.sampled:
                return
            self._ended.append(span)
            self._unsent[attempt] += 1
            if self._thread is None:
                self._thread = _start_without_context(self._send_all)
            self._changed.notify_all()

    def end_open(self, attempt: str) -> None:
        """End the spans that an attempt has open now, as failed: it is out of time, and they say what it was at."""
        with self._changed:
            spans = list(self._open.pop(attempt, {}).values())
        for span in reversed(spans):
            span.set_status(Status(StatusCode.ERROR, "the attempt was stopped before this had ended"))
            span.end()

    def _close(self, attempt: str, span_id: int) -> None:
        spans = self._open.get(attempt)
        if spans is not None:
            spans.pop(span_id, None)
            if not spans:
                del self._open[attempt]

    def flush(self, attempt: str) -> Future[None] | None:
        """Have an attempt's spans sent at once; None where there are none to wait for. Open ones are forgotten."""
        with self._changed:
            self._open.pop(attempt, None)
            if not self._unsent[attempt]:
                del self._unsent[attempt]
                return None
            self._urgent = True
            self._changed.notify_all()
            return self._sent

    def _send_all(self) -> None:
        context.attach(context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._urgent)
                self._changed.wait_for(lambda: self._urgent or len(self._ended) >= _BATCH, _LONGEST_WAIT_S)
                batch, self._ended = self._ended, []
                done, self._sent = self._sent, Future()
                self._urgent = False
            for start in range(0, len(batch), _BATCH):
                self._send(batch[start : start + _BATCH])
            with self._changed:
                self._unsent -= Counter(str((span.attributes or {})[ATTEMPT]) for span in batch)
            done.set_result(None)

    def _send(self, batch: Sequence[ReadableSpan]) -> None:
        try:
            result = self._exporter.export(batch)
        except Exception:
            _log.exception("%d spans could not be sent", len(batch))
        else:
            if result is not SpanExportResult.SUCCESS:
                _log.warning("%d spans could not be sent: the server was away, or did not want them", len(batch))


class SpanExport:
    """OpenTelemetry in a host. Made before the agent is loaded; `provide` is called when it is."""

    def __init__(self, server: str, key: str) -> None:
        self.sender = AttemptSpanProcessor(_BatchExporter(server, key))
        self._joined: list[Any] = []
        self._own: TracerProvider | None = None
        self._set = trace.set_tracer_provider
        trace.set_tracer_provider = self._hear_of  # type: ignore[assignment]

    def provide(self) -> None:
        """Give OpenTelemetry a provider, unless the agent has."""
        present = trace.get_tracer_provider()
        if not isinstance(present, trace.ProxyTracerProvider):
            self._join(present)
            return
        limits = SpanLimits(max_attribute_length=_LONGEST_ATTRIBUTE)
        self._own = TracerProvider(resource=Resource({"service.name": "agent"}), span_limits=limits)
        self._join(self._own)
        self._set(self._own)

    def _hear_of(self, provider: trace.TracerProvider) -> None:
        """The agent sets a provider: it is welcome even after ours was set, which a second one would not be."""
        self._join(provider)
        if self._own is not None and trace.get_tracer_provider() is self._own:
            trace._TRACER_PROVIDER = provider
        else:
            self._set(provider)

    def _join(self, provider: Any) -> None:
        if hasattr(provider, "add_span_processor") and not any(provider is joined for joined in self._joined):
            self._joined.append(provider)
            provider.add_span_processor(self.sender)


class _BatchExporter(SpanExporter):
    """OTLP's, made with the first spans: most hosts never need it, and it takes long to import."""

    def __init__(self, server: str, key: str) -> None:
        self._server, self._key = server, key
        self._exporter: SpanExporter | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            headers = {"authorization": f"Bearer {self._key}"}
            self._exporter = OTLPSpanExporter(f"{self._server}/v1/traces", headers=headers, timeout=_EXPORT_S)
        return self._exporter.export(spans)


def _start_without_context(run: Any) -> threading.Thread:
    """A thread that outlives the attempt during which it is started, and is not part of it."""
    thread = threading.Thread(target=run, name="leyden-spans", daemon=True)
    token = context.attach(context.Context())
    try:
        thread.start()
    finally:
        context.detach(token)
    return thread
