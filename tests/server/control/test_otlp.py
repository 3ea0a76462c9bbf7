"""Spans over OTLP, sent by the real OpenTelemetry SDK and by hand: each lands on the attempt it belongs to, once."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.parser import text_string_to_metric_families
from serving import ServerProcess

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, GroupSpec, Lease, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import RunSettings, Span, Task
from leyden.server.control.keys import KeyKind
from leyden.server.control.otlp import read_spans
from leyden.server.http.errors import ApiError

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


async def lease(remote: Remote, count: int = 1, pool: str | None = None) -> list[Lease]:
    """Attempts of a run of their own."""
    run = f"r-{uuid4().hex}"
    await remote.create_run(RunSpec(run, RunSettings(lease_s=3600)))
    await remote.enqueue(run, GroupSpec(f"{run}-g", Task("t", None), size=count))
    return await remote.lease(LeaseRequest("w", count, run=run, pool=pool))


async def spans_of(remote: Remote, leased: Lease) -> tuple[Span, ...]:
    return (await remote.get_episode(leased.attempt.run, leased.attempt.id)).spans


def exporter(server: ServerProcess, key: str, compression: Compression = Compression.NoCompression) -> SpanExporter:
    return OTLPSpanExporter(
        f"{server.url}/v1/traces", headers={"authorization": f"Bearer {key}"}, compression=compression
    )


def recorded(**resource: str) -> tuple[trace.Tracer, InMemorySpanExporter]:
    """A tracer of the real SDK whose finished spans are at hand."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource(resource))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return provider.get_tracer("my.agent"), kept


def span_json(name: str = "s", trace_id: str = "ab" * 16, **attributes: str) -> dict[str, Any]:
    pairs = [{"key": key.replace("_", "."), "value": {"stringValue": value}} for key, value in attributes.items()]
    return {"traceId": trace_id, "spanId": uuid4().hex[:16], "name": name, "kind": 1, "attributes": pairs}


def export_json(*spans: dict[str, Any], **resource: str) -> dict[str, Any]:
    pairs = [{"key": key.replace("_", "."), "value": {"stringValue": value}} for key, value in resource.items()]
    return {"resourceSpans": [{"resource": {"attributes": pairs}, "scopeSpans": [{"spans": list(spans)}]}]}


async def post(
    server: ServerProcess, key: str, body: bytes | dict[str, Any], content_type: str = JSON
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"authorization": f"Bearer {key}", "content-type": content_type}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/traces", data=data, headers=headers) as reply,
    ):
        answer = await reply.read()
        return reply.status, msgspec.json.decode(answer) if reply.content_type == JSON else answer


async def rejected_so_far(server: ServerProcess) -> float:
    headers = {"authorization": f"Bearer {server.admin_key}"}
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics", headers=headers) as reply:
        page = await reply.text()
    (value,) = (
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "leyden_spans_rejected_total"
    )
    return value


# What arrives


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip, Compression.Deflate])
async def test_a_trace_of_the_sdk_arrives_whole(
    server: ServerProcess, remote: Remote, compression: Compression
) -> None:
    (leased,) = await lease(remote)
    provider = TracerProvider(resource=Resource({"service.name": "calc", "replica": 3}))
    provider.add_span_processor(SimpleSpanProcessor(exporter(server, leased.key, compression)))
    tracer = provider.get_tracer("my.agent")
    elsewhere = SpanContext(trace_id=7, span_id=9, is_remote=True, trace_flags=TraceFlags(1))
    attributes: dict[str, Any] = {
        "text": "naïve ☃",
        "whole": -(2**63),
        "real": 0.1,
        "yes": True,
        "texts": ("a", "b"),
        "wholes": (1, 2),
        "empty": (),
    }
    with tracer.start_as_current_span("agent", kind=SpanKind.SERVER, links=[Link(elsewhere, {"why": "retry"})]) as root:
        with tracer.start_as_current_span("tool", kind=SpanKind.CLIENT, attributes=attributes) as tool:
            tool.add_event("asked", {"tries": 2}, timestamp=1_700_000_000_000_000_001)
            tool.set_status(Status(StatusCode.ERROR, "no such table"))
        root.set_status(Status(StatusCode.OK))
    provider.shutdown()

    child, parent = await spans_of(remote, leased)
    assert (parent.name, parent.parent_id, parent.kind, parent.status) == ("agent", None, "server", "ok")
    assert (child.name, child.kind, child.scope) == ("tool", "client", "my.agent")
    assert (child.trace_id, child.parent_id) == (parent.trace_id, parent.span_id)
    assert child.trace_id == format(root.get_span_context().trace_id, "032x")
    assert (child.status, child.status_message) == ("error", "no such table")
    assert parent.start_ns <= child.start_ns <= child.end_ns <= parent.end_ns
    assert child.attributes == {
        key: list(value) if isinstance(value, tuple) else value for key, value in attributes.items()
    }
    assert child.events == ({"name": "asked", "at_ns": 1_700_000_000_000_000_001, "attributes": {"tries": 2}},)
    assert parent.links == ({"trace_id": f"{7:032x}", "span_id": f"{9:016x}", "attributes": {"why": "retry"}},)
    assert (child.resource["service.name"], child.resource["replica"]) == ("calc", 3)


async def test_json_written_by_hand_arrives_whole(server: ServerProcess, remote: Remote) -> None:
    (leased,) = await lease(remote)
    values = {
        "text": {"stringValue": "☃"},
        "whole": {"intValue": "-9223372036854775808"},
        "bare": {"intValue": 5},
        "real": {"doubleValue": 0.5},
        "no": {"boolValue": False},
        "bytes": {"bytesValue": "/wA="},
        "list": {"arrayValue": {"values": [{"intValue": "1"}, {"arrayValue": {"values": [{"stringValue": "x"}]}}]}},
        "map": {"kvlistValue": {"values": [{"key": "k", "value": {"boolValue": True}}]}},
        "nothing": {},
    }
    span = {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "eee19b7ec3c1b174",
        "parentSpanId": "eee19b7ec3c1b173",
        "name": "by hand",
        "kind": 3,
        "startTimeUnixNano": "18446744073709551615",
        "endTimeUnixNano": "18446744073709551615",
        "attributes": [{"key": key, "value": value} for key, value in values.items()],
        "events": [{"name": "e", "timeUnixNano": "12", "attributes": []}],
        "links": [{"traceId": "ab" * 16, "spanId": "cd" * 8}],
        "status": {"code": 2, "message": "bad"},
        "aFieldOfTomorrow": {"x": 1},
    }
    body = export_json(span)
    body["resourceSpans"][0]["scopeSpans"][0]["scope"] = {"name": "curl"}
    assert await post(server, leased.key, body) == (200, {})
    (found,) = await spans_of(remote, leased)
    assert found == Span(
        trace_id="5b8efff798038103d269b633813fc60c",
        span_id="eee19b7ec3c1b174",
        parent_id="eee19b7ec3c1b173",
        name="by hand",
        kind="client",
        start_ns=2**64 - 1,
        end_ns=2**64 - 1,
        status="error",
        status_message="bad",
        attributes={
            "text": "☃",
            "whole": -(2**63),
            "bare": 5,
            "real": 0.5,
            "no": False,
            "bytes": "/wA=",
            "list": [1, ["x"]],
            "map": {"k": True},
            "nothing": None,
        },
        events=({"name": "e", "at_ns": 12, "attributes": {}},),
        links=({"trace_id": "ab" * 16, "span_id": "cd" * 8, "attributes": {}},),
        scope="curl",
    )


async def test_an_exporter_that_repeats_itself_adds_nothing(server: ServerProcess, remote: Remote) -> None:
    (leased,) = await lease(remote)
    tracer, kept = recorded()
    with tracer.start_as_current_span("a"), tracer.start_as_current_span("b"):
        pass
    sender = exporter(server, leased.key)
    for _ in range(3):
        assert sender.export(kept.get_finished_spans()) is SpanExportResult.SUCCESS
    assert [span.name for span in await spans_of(remote, leased)] == ["b", "a"]


# Whose they are


async def test_spans_sent_with_an_attempts_key_are_its_own_whatever_they_say(
    server: ServerProcess, remote: Remote
) -> None:
    mine, other = await lease(remote, 2)
    sly = span_json("sly", trace_id=other.attempt.trace_id, leyden_attempt=other.attempt.id)
    assert await post(server, mine.key, export_json(sly, leyden_attempt=other.attempt.id)) == (200, {})
    assert [span.name for span in await spans_of(remote, mine)] == ["sly"]
    assert await spans_of(remote, other) == ()


def by_attribute(of: Lease) -> Sequence[ReadableSpan]:
    tracer, kept = recorded()
    tracer.start_span("work", attributes={"leyden.attempt": of.attempt.id}).end()
    return kept.get_finished_spans()


def by_resource(of: Lease) -> Sequence[ReadableSpan]:
    tracer, kept = recorded(**{"leyden.attempt": of.attempt.id})
    tracer.start_span("work").end()
    return kept.get_finished_spans()


def by_trace(of: Lease) -> Sequence[ReadableSpan]:
    tracer, kept = recorded()
    tracer.start_span("work", TraceContextTextMapPropagator().extract({"traceparent": of.traceparent})).end()
    return kept.get_finished_spans()


@pytest.mark.parametrize("named", [by_attribute, by_resource, by_trace])
@pytest.mark.parametrize("kind", [KeyKind.POOL, KeyKind.WORKER, KeyKind.ADMIN])
async def test_spans_sent_for_many_attempts_find_theirs(
    server: ServerProcess, remote: Remote, named: Any, kind: KeyKind
) -> None:
    first, second = await lease(remote, 2, pool="hall")
    scope = {"pool": "hall"} if kind is KeyKind.POOL else {}
    before = await rejected_so_far(server)
    sent = [*named(first), *named(second)]
    assert exporter(server, server.key(kind, **scope)).export(sent) is SpanExportResult.SUCCESS
    assert await rejected_so_far(server) == before
    for leased, span in zip((first, second), sent, strict=True):
        assert [found.span_id for found in await spans_of(remote, leased)] == [format(span.context.span_id, "016x")]


@pytest.fixture
def outsiders(server: ServerProcess) -> dict[str, str]:
    return {
        "another pool": server.key(KeyKind.POOL, pool="annex"),
        "a pool of another run": server.key(KeyKind.POOL, pool="hall", run="elsewhere"),
        "a worker of another run": server.key(KeyKind.WORKER, run="elsewhere"),
    }


async def test_spans_of_another_pool_or_run_are_rejected_and_counted(
    server: ServerProcess, remote: Remote, outsiders: dict[str, str]
) -> None:
    (leased,) = await lease(remote, pool="hall")
    before = await rejected_so_far(server)
    for key in outsiders.values():
        for span in (span_json(leyden_attempt=leased.attempt.id), span_json(trace_id=leased.attempt.trace_id)):
            status, answer = await post(server, key, export_json(span))
            assert status == 200
            assert answer["partialSuccess"]["rejectedSpans"] == "1"
            assert "no active attempt" in answer["partialSuccess"]["errorMessage"]
    assert await rejected_so_far(server) == before + 2 * len(outsiders)
    assert await spans_of(remote, leased) == ()


async def test_spans_without_an_attempt_do_not_keep_the_others_out(server: ServerProcess, remote: Remote) -> None:
    alive, over = await lease(remote, 2, pool="hall")
    await remote.finish(over.attempt.run, over.attempt.id, FinishRequest(Outcome(Ending.AGENT_ERROR)))
    sent = export_json(
        span_json("kept", leyden_attempt=alive.attempt.id),
        span_json("too late", leyden_attempt=over.attempt.id),
        span_json("of nobody"),
        span_json("of a stranger", leyden_attempt="never-was"),
    )
    status, answer = await post(server, server.key(KeyKind.POOL, pool="hall"), sent)
    assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "3")
    assert [span.name for span in await spans_of(remote, alive)] == ["kept"]
    assert await spans_of(remote, over) == ()


async def test_a_rejection_in_protobuf_is_answered_in_protobuf(server: ServerProcess, remote: Remote) -> None:
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, name="lost")
    status, answer = await post(server, server.key(KeyKind.WORKER), request.SerializeToString(), PROTOBUF)
    assert status == 200
    assert ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans == 1


# What is not OTLP


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (PROTOBUF, b"\xff\xff\xff"),
        (PROTOBUF, b"{}"),
        (PROTOBUF, b"\x0a\x7f"),
        (JSON, b""),
        (JSON, b"\xff"),
        (JSON, b"{"),
        (JSON, b"null"),
        (JSON, b"3"),
        (JSON, b"[]"),
        (JSON, b'"text"'),
        (JSON, b'{"resourceSpans": 3}'),
        (JSON, b'{"resourceSpans": [3]}'),
        (JSON, b'{"resourceSpans": [null]}'),
        (JSON, b'{"resourceSpans": {"scopeSpans": []}}'),
        (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}'),
        (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "abcd", "spanId": "ab"}]}]}]}'),
        (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": -1}]}]}]}'),
        (JSON, b"[" * 100_000),
        (JSON, b'{"resourceSpans":' * 5_000),
    ],
)
async def test_what_is_not_an_export_is_refused(server: ServerProcess, content_type: str, body: bytes) -> None:
    status, answer = await post(server, server.admin_key, body, content_type)
    assert (status, answer["error"]["type"]) == (400, "invalid_request")


@pytest.mark.parametrize("content_type", ["text/plain", "application/msgpack", "application/jsonx"])
async def test_a_content_type_that_is_not_otlp_is_refused(server: ServerProcess, content_type: str) -> None:
    status, answer = await post(server, server.admin_key, b"{}", content_type)
    assert (status, answer["error"]["type"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
async def test_a_content_type_is_read_as_http_has_it(server: ServerProcess, content_type: str) -> None:
    sent = msgspec.json.encode(export_json(span_json()))
    status, answer = await post(server, server.admin_key, sent, content_type)
    assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "1")


_request = ["resourceSpans", "resource", "scopeSpans", "scope", "spans", "attributes", "key", "value", "values"]
_span = ["traceId", "trace_id", "spanId", "name", "kind", "startTimeUnixNano", "status", "code", "events", "links"]
_value = ["stringValue", "intValue", "doubleValue", "bytesValue", "arrayValue", "kvlistValue"]
_names = st.sampled_from([*_request, *_span, *_value])
_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("ab" * 16)
_documents = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4), max_leaves=30
)


@given(st.binary() | _documents.map(msgspec.json.encode), st.sampled_from([JSON, PROTOBUF]))
@settings(max_examples=100, deadline=None)
def test_whatever_is_sent_is_spans_or_a_refusal(body: bytes, content_type: str) -> None:
    try:
        found = read_spans(body, content_type)
    except ApiError as refusal:
        assert refusal.status == 400
    else:
        assert all(isinstance(span, Span) for span in found)
