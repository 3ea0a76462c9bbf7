"""Agents with an OpenTelemetry of their own, set up when they are imported or only when they are called."""

import os

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()


def set_up() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


if "LATE" not in os.environ:
    set_up()


def solve(task: dict[str, str]) -> float:
    if "LATE" in os.environ:
        set_up()
    with trace.get_tracer("mine").start_as_current_span(task["name"]):
        pass
    return float([span.name for span in exporter.get_finished_spans()] == [task["name"]])
