"""Spans of whatever emits them are with the server before their attempts end (those of frameworks: test_frameworks)."""

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from worker_harness import WorkerHarness

from leyden.client.tracing.context import attempt_context
from leyden.client.tracing.exporter import AttemptSpanProcessor
from leyden.outcomes import Ending


class SlowExporter(SpanExporter):
    """Exports when it may."""

    def __init__(self) -> None:
        self.may_export = threading.Event()
        self.exported: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self.may_export.wait(30)
        self.exported += [span.name for span in spans]
        return SpanExportResult.SUCCESS


def test_spans_are_exported_after_a_wait_for_them_was_cancelled() -> None:
    exporter = SlowExporter()
    processor, provider = AttemptSpanProcessor(exporter), TracerProvider()
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    for attempt in ("a.1", "b.1"):
        context = attempt_context(attempt, f"00-{'1' * 32}-{'2' * 16}-01")
        context.run(lambda name: tracer.start_span(name).end(), attempt)
        sent = processor.flush(attempt)
        assert sent is not None
        if attempt == "a.1":
            sent.cancel()
            exporter.may_export.set()
        else:
            sent.result(timeout=20)
    assert exporter.exported == ["a.1", "b.1"]


@pytest.mark.parametrize("late", [False, True])
async def test_a_tracer_provider_of_the_agent_is_used(
    harness: WorkerHarness, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setenv("LATE", "1")
    await harness.open()
    await harness.queue("g", {"name": "work"})
    with harness.worker("own_provider.py:solve"):
        episode = await harness.episode("g")
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.SUCCEEDED
    assert episode.final_reward(0.0) == 1.0  # its own exporter has the span
    assert [span.name for span in episode.spans] == ["work"]  # and so has the server
