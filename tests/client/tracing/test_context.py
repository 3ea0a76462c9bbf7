"""What a request says of the attempt that makes it, beside what a framework says."""

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from leyden.client.tracing.context import attempt_context, inject
from leyden.records import trace_id

ATTEMPT = "run-1.0.1"
PARENT = f"00-{trace_id(ATTEMPT)}-{'1' * 16}-01"


def signed(headers: dict[str, str]) -> dict[str, str]:
    inject(headers)
    return headers


def test_a_request_carries_the_attempts_trace_and_baggage() -> None:
    inside = attempt_context(ATTEMPT, PARENT)
    assert inside.run(signed, {}) == {"traceparent": PARENT, "baggage": f"leyden.attempt={ATTEMPT}"}
    assert signed({}) == {}


def test_a_framework_that_starts_its_own_trace_does_not_hide_the_attempt() -> None:
    tracer = TracerProvider().get_tracer("framework")

    def agent() -> dict[str, str]:
        with tracer.start_as_current_span("root", context=trace.set_span_in_context(trace.INVALID_SPAN)):
            return signed({})

    headers = attempt_context(ATTEMPT, PARENT).run(agent)
    assert headers["baggage"] == f"leyden.attempt={ATTEMPT}"
    assert trace_id(ATTEMPT) not in headers["traceparent"]


def test_what_a_request_says_already_stays() -> None:
    inside = attempt_context(ATTEMPT, PARENT)
    said = inside.run(signed, {"traceparent": "mine", "baggage": "user=1"})
    assert said == {"traceparent": "mine", "baggage": f"user=1,leyden.attempt={ATTEMPT}"}
    other = {"baggage": "leyden.attempt=other.0.1"}
    assert inside.run(signed, dict(other))["baggage"] == other["baggage"]
