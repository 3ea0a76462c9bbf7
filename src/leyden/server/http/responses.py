"""The types of the table of routes: `Route`, the `Request` that its handler receives, and `Raw` bodies.

Matching, keys, decoding, errors and the OpenAPI description are all derived from a `Route`.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from leyden.api.endpoint import Permission
from leyden.server.control.keys import Key
from leyden.server.http.errors import ApiError

REQUEST_ID_HEADERS = ("x-request-id", "request-id")
"""By which OpenAI's and Anthropic's SDKs know the id of a request."""
Body = TypeVar("Body")
Query = TypeVar("Query")


class Request(Generic[Body, Query]):
    """A permitted request, with its parts decoded to the types that its route names."""

    __slots__ = ("body", "headers", "key", "path", "query")

    def __init__(self, path: dict[str, str], query: Query, body: Body, key: Key, headers: Mapping[str, str]) -> None:
        self.path, self.query, self.body, self.key, self.headers = path, query, body, key, headers


class Raw(msgspec.Struct, frozen=True):
    """A body, or an answer, that is passed as bytes and neither decoded nor encoded."""

    content: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


class Route(msgspec.Struct, frozen=True):
    """One entry of the table of routes."""

    method: str
    path: str
    """In Starlette's syntax: `{name}` matches one segment, `{name:path}` all that follow."""
    permission: Permission | None
    """What a key needs; None: no key is needed."""
    handler: Callable[[Any, Any], Awaitable[Any]]
    body: Any = None
    query: Any = None
    returns: Any = None
    waits: bool = False
    """Whether the handler may wait for long; a client that disconnects then cancels it."""
    error: Callable[[ApiError, Mapping[str, str]], bytes] | None = None
    """Writes the body of an error, given the headers of the request, in the route's dialect; None: an `ErrorBody`."""
    request_ids: bool = False
    """Whether every answer has an id of its request, which the log has too if it failed."""
    key_in_query: bool = False
    """Whether a caller may send its key as `?key=`, as Google's API allows."""
    error_type: str = "application/json"
    """Media type of what `error` writes."""
    error_headers: tuple[tuple[str, str], ...] = ()
    media_types: tuple[str, ...] = ("application/json",)
    """Media types of raw bodies and answers."""

    @property
    def takes_json(self) -> bool:
        """Whether its body is decoded as JSON, or as MessagePack if the client says so."""
        return self.body is not None and (self.body is not Raw or self.media_types[0] == "application/json")
