"""Reads spans from OTLP/HTTP export requests, in protobuf or JSON."""

from base64 import b64encode
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal

import msgspec
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from leyden.records import Span
from leyden.server.http.content import JSON, MAX_VALUES, TooManyValues, check_json, media_type
from leyden.server.http.errors import ApiError

PROTOBUF = "application/x-protobuf"
_MAX_DEPTH = 100
ATTEMPT = "leyden.attempt"
"""The attribute of a span, or of its resource, that names its attempt."""

_STATUS: dict[int, Literal["unset", "ok", "error"]] = {
    Status.STATUS_CODE_UNSET: "unset",
    Status.STATUS_CODE_OK: "ok",
    Status.STATUS_CODE_ERROR: "error",
}
_KIND: dict[int, str] = {number: name.removeprefix("SPAN_KIND_").lower() for name, number in ProtoSpan.SpanKind.items()}


def read_spans(data: bytes, content_type: str) -> list[Span]:
    """Return the spans of an export request. It takes long for a large one, so it belongs off the event loop."""
    request = ExportTraceServiceRequest()
    media = media_type(content_type)
    try:
        if media == PROTOBUF:
            _check_protobuf(data, ExportTraceServiceRequest.DESCRIPTOR)
            request.ParseFromString(data)
        elif media == JSON:
            check_json(data)
            document = msgspec.json.decode(data, type=dict[str, Any])
            ParseDict(_with_base64_ids(document), request, ignore_unknown_fields=True)
        else:
            raise ApiError(415, "unsupported_media_type", f"send {PROTOBUF} or {JSON}, not {media or 'nothing'}")
    except (DecodeError, ParseError, msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise ApiError(400, "invalid_request", f"this is not an OTLP trace export: {error}") from error
    return list(_spans(request))


def response_body(rejected: int, message: str, content_type: str) -> bytes:
    """Return the body of the response to an export request, in the request's format."""
    if media_type(content_type) != JSON:
        success = ExportTracePartialSuccess(rejected_spans=rejected, error_message=message) if rejected else None
        return ExportTraceServiceResponse(partial_success=success).SerializeToString()
    partial = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": message}} if rejected else {}
    return msgspec.json.encode(partial)


def attempt_of(span: Span) -> str | None:
    """Return the attempt that a span names."""
    named = span.attributes.get(ATTEMPT) or span.resource.get(ATTEMPT)
    return named if isinstance(named, str) else None


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield _span(span, resource, of_scope.scope.name)


def _span(span: ProtoSpan, resource: dict[str, Any], scope: str) -> Span:
    if len(span.trace_id) != 16 or len(span.span_id) != 8 or len(span.parent_span_id) not in (0, 8):
        raise ApiError(400, "invalid_request", f"span {span.name!r}: a trace id has 16 bytes and a span id has 8")
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        name=span.name,
        kind=_KIND.get(span.kind, "unspecified"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=_STATUS.get(span.status.code, "unset"),
        status_message=span.status.message,
        attributes=_attributes(span.attributes),
        events=tuple(
            {"name": event.name, "at_ns": event.time_unix_nano, "attributes": _attributes(event.attributes)}
            for event in span.events
        ),
        links=tuple(
            {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex(), "attributes": _attributes(link.attributes)}
            for link in span.links
        ),
        scope=scope,
        resource=resource,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return b64encode(value.bytes_value).decode()
        case kind:
            return getattr(value, kind)


def _with_base64_ids(document: Any) -> Any:
    """Convert ids from the hexadecimal of OTLP's JSON to the base64 that protobuf's JSON mapping expects."""
    if isinstance(document, list):
        return [_with_base64_ids(item) for item in document]
    if not isinstance(document, dict):
        return document
    return {
        name: b64encode(bytes.fromhex(value)).decode()
        if name in ("traceId", "spanId", "parentSpanId") and isinstance(value, str)
        else _with_base64_ids(value)
        for name, value in document.items()
    }


def _check_protobuf(data: bytes, message: Descriptor) -> None:
    """Raise `TooManyValues` if a message has too many fields, nested ones included.

    Bytes that are no message end the count: the parser refuses them.
    """
    count = 0
    todo: list[tuple[int, int, Any, int]] = [(0, len(data), message, 0)]
    while todo:
        at, end, kind, depth = todo.pop()
        nested = _nested_messages(kind)
        while at < end:
            count += 1
            if count > MAX_VALUES:
                raise TooManyValues
            tag, at = _varint(data, at)
            match tag & 7:  # the wire type
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:
                    length, at = _varint(data, at)
                    inner = nested.get(tag >> 3)
                    if inner is not None and length and depth < _MAX_DEPTH:
                        todo.append((at, min(at + length, end), inner, depth + 1))
                    at += length
                case 5:
                    at += 4
                case _:
                    return


@cache
def _nested_messages(message: Descriptor) -> dict[int, Any]:
    return {number: field.message_type for number, field in message.fields_by_number.items() if field.message_type}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return value, len(data)
