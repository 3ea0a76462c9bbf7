"""Request and response content: reading bodies within a size limit, decompression, JSON and MessagePack."""

import asyncio
import re
import zlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive

from leyden.records import ID_PATTERN, ID_RULE
from leyden.server.http.errors import ApiError
from leyden.server.http.limits import SMALL_BODY, BodyReservation

JSON = "application/json"
MSGPACK = "application/msgpack"
MAX_VALUES = SMALL_BODY
"""Fields of a protobuf message, or strings and separators of a JSON document: thousands of spans or messages.

A megabyte can hold half a million empty messages or lists, each of which costs far more memory and time as an object
than as bytes. Values are counted before a body is expanded, up to the limit, so that the time for it is bounded too.
"""
_STRUCTURE = (b"{", b"[", b",")


async def read_body(headers: Mapping[str, str], receive: Receive, limit: int, reservation: BodyReservation) -> bytes:
    """Read and decompress the whole body. The limit holds for the compressed and for the decompressed size."""
    try:
        declared = int(headers.get("content-length", "0"))
    except ValueError as error:
        raise ApiError(400, "invalid_request", "content-length is not a number") from error
    if declared > limit:
        raise too_large(limit)
    data, complete = bytearray(), False
    while not complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "disconnected", "the client disconnected before the request was complete")
        data += message.get("body", b"")
        if len(data) > limit:
            raise too_large(limit)
        reservation.grow(len(data))
        complete = not message.get("more_body", False)
    match headers.get("content-encoding", "identity").lower():
        case "identity":
            return bytes(data)
        case "gzip" | "deflate":
            plain = await asyncio.to_thread(_inflate, data, limit)
            reservation.grow(max(len(data), len(plain)))
            return plain
        case other:
            raise ApiError(415, "unsupported_encoding", f"content-encoding {other} is not supported: use gzip or none")


def _inflate(data: bytearray, limit: int) -> bytes:
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        plain = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise ApiError(400, "invalid_request", f"the compressed body is broken: {error}") from error
    if len(plain) > limit:
        raise too_large(limit)
    if not inflater.eof or inflater.unused_data:
        wrong = "has trailing data" if inflater.eof else "is truncated"
        raise ApiError(400, "invalid_request", f"the compressed body {wrong}")
    return plain


def too_large(limit: int) -> ApiError:
    """Return the error for a body over the limit."""
    return ApiError(413, "too_large", f"the body is larger than the {limit} bytes this server takes (--max-body-mb)")


_JSON_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MSGPACK_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def media_type(content_type: str) -> str:
    """Return the media type of a content-type header, without parameters."""
    return content_type.partition(";")[0].strip().lower()


def decode(data: bytes, content_type: str, wanted: Any) -> Any:
    """Decode a body to the type that its route names."""
    if not data:
        raise ApiError(400, "invalid_request", "the request has no body")
    media = media_type(content_type) or JSON
    decoder: msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]
    if media == JSON:
        decoder = _JSON_DECODERS.get(wanted) or _JSON_DECODERS.setdefault(wanted, msgspec.json.Decoder(wanted))
    elif media == MSGPACK:
        decoder = _MSGPACK_DECODERS.get(wanted) or _MSGPACK_DECODERS.setdefault(wanted, msgspec.msgpack.Decoder(wanted))
    else:
        raise ApiError(415, "unsupported_media_type", f"send {JSON} or {MSGPACK}, not {media}")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_request", f"the body is not valid {media}: {error}") from error


async def check_values(data: bytes, content_type: str) -> None:
    """Raise an error if a body that is decoded as this content type would expand to too many objects.

    MessagePack, which only workers and trainers send, is not counted but limited in size.
    """
    if len(data) <= SMALL_BODY:
        return
    if media_type(content_type) == MSGPACK:
        raise ApiError(413, "too_large", f"more than {SMALL_BODY} bytes of {MSGPACK}: send it as {JSON}")
    try:
        await asyncio.to_thread(check_json, data)
    except TooManyValues as error:
        raise ApiError(413, "too_large", str(error)) from error


def decode_query(query: bytes, wanted: Any) -> Any:
    """Decode a query string to the type that its route names. The values of a repeated name are joined by commas."""
    if wanted is None:
        if query:
            raise ApiError(400, "invalid_request", "this path takes no query parameters")
        return None
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
        values: dict[str, str] = {}
        for name, value in pairs:
            values[name] = f"{values[name]},{value}" if name in values else value
        return msgspec.convert(values, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except ValueError as error:
        raise ApiError(400, "invalid_request", f"the query string cannot be read: {error}") from error


def check_path(values: Mapping[str, str]) -> None:
    """Raise an error if a parameter in the path is not a valid id."""
    for name, value in values.items():
        if len(value) > 160 or not all(map(_is_id, value.split("/"))):
            raise ApiError(400, "invalid_request", f"{name}: an id is {ID_RULE}", field=name)


_is_id = re.compile(ID_PATTERN).match


def encode(value: Any, accept: str) -> tuple[bytes, str]:
    """Encode an answer as MessagePack if the client accepts it and it can represent the answer, else as JSON."""
    if MSGPACK in accept:
        try:
            return _TO_MSGPACK.encode(value), MSGPACK
        except OverflowError:  # an integer of more than 64 bits, from a JSON document
            pass
    return _TO_JSON.encode(value), JSON


_TO_JSON = msgspec.json.Encoder()
_TO_MSGPACK = msgspec.msgpack.Encoder()


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Build an error that names the field, whose path msgspec appends to its message."""
    message, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".") or None
    return ApiError(400, "invalid_request", f"{field}: {message}" if field else message, field=field)


class TooManyValues(ValueError):
    """A body has more than `MAX_VALUES` values."""

    def __init__(self) -> None:
        super().__init__(f"the body has more than {MAX_VALUES} values: send it in parts")


def check_json(data: bytes) -> None:
    """Raise `TooManyValues` if a JSON document has too many. Commas and brackets within strings do not count."""
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    if data.count(b'"') // 2 + _structure(data, 0, len(data)) <= MAX_VALUES:
        return
    count = at = 0
    while at < len(data):
        opening = data.find(b'"', at)
        end = len(data) if opening < 0 else opening
        count += _structure(data, at, end) + 1
        if count > MAX_VALUES:
            raise TooManyValues
        closing = data.find(b'"', end + 1)
        at = len(data) if closing < 0 else closing + 1


def _structure(data: bytes, start: int, end: int) -> int:
    return sum(data.count(mark, start, end) for mark in _STRUCTURE)
