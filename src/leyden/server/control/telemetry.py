"""Metrics of the server for Prometheus, served at /metrics."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from leyden.records import Event, EventKind
from leyden.server.control.keys import ActiveLeases
from leyden.server.gateway.calls.recorder import Recorder
from leyden.store.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Telemetry:
    """Counts requests and events. Other values are read on each scrape; the caller of `render` sets `store_bytes`."""

    def __init__(self, store: Store, leases: ActiveLeases, calls: Callable[[], Recorder | None]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("leyden_requests", "Requests answered", ["route", "status"], registry=self.registry)
        self._seconds = Histogram(
            "leyden_request_seconds",
            "Time to answer, including long polls",
            ["route"],
            buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=self.registry,
        )
        self._endings = Counter("leyden_attempts_ended", "Attempts by ending", ["ending"], registry=self.registry)
        self._late = Counter("leyden_late_reports", "Reports of attempts that had ended", registry=self.registry)
        self.refused = Counter("leyden_requests_refused", "Requests refused", ["reason"], registry=self.registry)
        self.spans_rejected = Counter(
            "leyden_spans_rejected", "Spans that belong to no active attempt of their key", registry=self.registry
        )
        self.store_bytes = Gauge("leyden_store_bytes", "Size on disk", registry=self.registry)
        self.registry.register(_StateCollector(store, leases, calls))
        self._series: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def record_response(self, route: str, status: int, seconds: float) -> None:
        """Count a response and its duration."""
        series = self._series.get((route, status))
        if series is None:  # labels() is slow, and there are few combinations
            series = self._requests.labels(route, str(status)), self._seconds.labels(route)
            self._series[route, status] = series
        series[0].inc()
        series[1].observe(seconds)

    def on_event(self, event: Event) -> None:
        """Count ended attempts and late reports."""
        if event.kind is EventKind.ATTEMPT_ENDED:
            self._endings.labels(event.data["ending"]).inc()
        elif event.kind is EventKind.ATTEMPT_LATE:
            self._late.inc()

    def count_refused(self) -> dict[str, int]:
        """Return how many requests were refused, by reason."""
        samples = (sample for metric in self.refused.collect() for sample in metric.samples)
        return {one.labels["reason"]: int(one.value) for one in samples if one.name.endswith("_total")}

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _StateCollector(Collector):
    """Reads the current state of the store, the leases and the recorder."""

    def __init__(self, store: Store, leases: ActiveLeases, calls: Callable[[], Recorder | None]) -> None:
        self._store, self._leases, self._calls = store, leases, calls

    def collect(self) -> Iterable[Metric]:
        writer = self._store.writer
        yield CounterMetricFamily("leyden_store_commits", "Transactions committed", value=writer.commits)
        yield CounterMetricFamily("leyden_store_operations", "Operations in them", value=writer.operations)
        yield CounterMetricFamily("leyden_store_busy_seconds", "Time spent in them", value=writer.busy_s)
        calls = CounterMetricFamily(
            "leyden_calls", "Model calls by the origin of their prompt", labels=["prompt_origin", "status"]
        )
        untrained = CounterMetricFamily(
            "leyden_calls_untrained", "Model calls of training rollouts that are not trained on", labels=["reason"]
        )
        strict = CounterMetricFamily(
            "leyden_strict_tool_calls", "Calls of strict tools that were validated and not enforced", labels=["result"]
        )
        if (recorder := self._calls()) is not None:
            for result, count in recorder.strict.counts.items():
                strict.add_metric([result], count)
            for labels, count in recorder.counts.items():
                calls.add_metric(labels, count)
            for reason, count in recorder.untrained.items():
                untrained.add_metric([reason], count)
        yield calls
        yield untrained
        yield strict
        yield GaugeMetricFamily("leyden_leases", "Active attempts", value=len(self._leases))
