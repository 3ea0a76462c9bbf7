"""One request, from bytes to bytes: what every route of the server has in common.

A route is a row of a table: method, path, what it does (for the keys), the types it takes and gives, and the function.
Matching, decoding, errors and the OpenAPI description all follow from the row. Bodies are JSON or MessagePack.
"""

import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from leyden.records import ID_PATTERN, ID_RULE
from leyden.server.keys import Key, Permission

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

JSON = "application/json"
MSGPACK = "application/msgpack"
EVENT_STREAM = "text/event-stream"

_ANYTHING = "/"  # stands for a parameter among the segments of a path, none of which can be this
_THE_REST = "//"  # and this for one that takes all the segments that are left

Body = TypeVar("Body")
Query = TypeVar("Query")


class ApiError(Exception):
    """An answer that says what is wrong and, where it is one field, which."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        field: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.field, self.headers = status, reason, message, field, headers


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """What went wrong."""

    type: str
    message: str
    field: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: ErrorDetail


class Request(Generic[Body, Query]):
    """A request that was permitted, with its parts decoded to the types its route names."""

    __slots__ = ("body", "headers", "key", "path", "query")

    def __init__(self, path: dict[str, str], query: Query, body: Body, key: Key, headers: dict[str, str]) -> None:
        self.path, self.query, self.body, self.key, self.headers = path, query, body, key, headers


class Raw(msgspec.Struct, frozen=True):
    """A body, or an answer, that is not ours to encode."""

    content: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


class Stream(msgspec.Struct, frozen=True):
    """An answer that comes in pieces: server-sent events, where nothing else is said."""

    chunks: AsyncGenerator[bytes, None]
    content_type: str = EVENT_STREAM
    headers: tuple[tuple[str, str], ...] = ()


class Route(msgspec.Struct, frozen=True):
    """One row of the table."""

    method: str
    path: str
    """A segment `{name}` takes one segment, `{name*}` at the end all that are left where no other route is."""
    act: Permission | None
    """None: anybody may."""
    handler: Callable[[Any, Any], Awaitable[Any]]
    body: Any = None
    query: Any = None
    returns: Any = None
    waits: bool = False
    """Whether it may be long in answering; then a caller who hangs up cancels it."""
    error: Callable[["ApiError"], bytes] | None = None
    """How its errors are written, where not like everybody else's."""


class Table:
    """Routes, found by path and method."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = routes
        self._root: dict[str, Any] = {}
        for route in routes:
            node = self._root
            for segment in route.path.strip("/").split("/"):
                anything = _THE_REST if segment.endswith("*}") else _ANYTHING
                node = node.setdefault(anything if segment.startswith("{") else segment, {})
            node.setdefault("", {})[route.method] = (route, _parameters(route.path))

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route of a request, and the values in its path."""
        node, values = self._root, list[str]()
        segments = path.strip("/").split("/")
        rest: tuple[dict[str, Any], list[str]] | None = None  # the last found, since it begins with most of the path
        for at, segment in enumerate(segments):
            if _THE_REST in node and segment:
                rest = node[_THE_REST], [*values, "/".join(segments[at:])]
            child = node.get(segment) if segment else None
            if child is None:
                child = node.get(_ANYTHING)
                values.append(segment)
            if child is None or not segment:
                node = {}
                break
            node = child
        if "" not in node and rest is not None:
            node, values = rest
        if "" not in node:
            raise ApiError(404, "not_found", f"there is nothing at {path}")
        methods = node[""]
        if method not in methods:
            allowed = ", ".join(sorted(methods))
            raise ApiError(405, "method_not_allowed", f"{path} takes {allowed}", headers=[("allow", allowed)])
        route, names = methods[method]
        return route, dict(zip(names, values, strict=True))


def _parameters(path: str) -> list[str]:
    return [segment[1:-1].removesuffix("*") for segment in path.split("/") if segment.startswith("{")]


async def read_body(receive: Receive, headers: dict[str, str], limit: int) -> bytes:
    """The whole body, unpacked, within a limit that holds for both its sizes."""
    try:
        declared = int(headers.get("content-length", "0"))
    except ValueError as error:
        raise ApiError(400, "invalid_request", "content-length is not a number") from error
    if declared > limit:
        raise too_large(limit)
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "disconnected", "the caller hung up before the request was whole")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
        more = message.get("more_body", False)
    data = b"".join(chunks)
    match headers.get("content-encoding", "identity").lower():
        case "identity":
            return data
        case "gzip" | "deflate":
            return _inflate(data, limit)
        case other:
            raise ApiError(415, "unsupported_encoding", f"content-encoding {other} is not known: use gzip or none")


def _inflate(data: bytes, limit: int) -> bytes:
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        plain = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise ApiError(400, "invalid_request", f"the compressed body is broken: {error}") from error
    if len(plain) > limit:
        raise too_large(limit)
    if not inflater.eof or inflater.unused_data:
        wrong = "has something behind it" if inflater.eof else "is cut short"
        raise ApiError(400, "invalid_request", f"the compressed body {wrong}")
    return plain


def too_large(limit: int) -> ApiError:
    """The error for a body over the limit."""
    return ApiError(413, "too_large", f"the body is larger than the {limit} bytes this server takes (--max-body-mb)")


_JSON_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MSGPACK_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def media_type(content_type: str) -> str:
    """What a content-type header names, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def decode(data: bytes, content_type: str, wanted: Any) -> Any:
    """A body as the type its route names."""
    if not data:
        raise ApiError(400, "invalid_request", "a body is needed")
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


def decode_query(query: bytes, wanted: Any) -> Any:
    """A query string as the type its route names."""
    if wanted is None:
        if query:
            raise ApiError(400, "invalid_request", "this takes no query parameters")
        return None
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
        return msgspec.convert(dict(pairs), wanted, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except ValueError as error:
        raise ApiError(400, "invalid_request", f"the query string cannot be read: {error}") from error


def check_path(values: dict[str, str]) -> None:
    """Refuse a path that names something no identifier can be."""
    for name, value in values.items():
        if len(value) > 160 or not all(map(_is_id, value.split("/"))):
            raise ApiError(400, "invalid_request", f"{name}: an id is {ID_RULE}", field=name)


_is_id = re.compile(ID_PATTERN).match


def encode(value: Any, accept: str) -> tuple[bytes, str]:
    """An answer in the form that the caller asked for; JSON where MessagePack cannot hold it or nothing was asked."""
    if MSGPACK in accept:
        try:
            return _TO_MSGPACK.encode(value), MSGPACK
        except OverflowError:  # an integer of more than 64 bits, in a document that came as JSON
            pass
    return _TO_JSON.encode(value), JSON


_TO_JSON = msgspec.json.Encoder()
_TO_MSGPACK = msgspec.msgpack.Encoder()


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Name the field: msgspec puts its path behind the message."""
    message, _, place = str(error).partition(" - at `$")
    field = place.rstrip("`").lstrip(".") or None
    return ApiError(400, "invalid_request", f"{field}: {message}" if field else message, field=field)
