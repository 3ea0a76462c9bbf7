"""The types of the table of routes: what a route is, what its handler receives, and how it reports an error.

Matching, keys, decoding, errors and the OpenAPI description all follow from a route's row.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from leyden.server.errors import ApiError
from leyden.server.keys import Key, Permission

Body = TypeVar("Body")
Query = TypeVar("Query")


class Request(Generic[Body, Query]):
    """A request that was permitted, with its parts decoded to the types its route names."""

    __slots__ = ("body", "headers", "key", "path", "query")

    def __init__(self, path: dict[str, str], query: Query, body: Body, key: Key, headers: Mapping[str, str]) -> None:
        self.path, self.query, self.body, self.key, self.headers = path, query, body, key, headers


class Raw(msgspec.Struct, frozen=True):
    """A body, or an answer, that is not ours to encode."""

    content: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


class Route(msgspec.Struct, frozen=True):
    """One row of the table."""

    method: str
    path: str
    """In Starlette's syntax: `{name}` matches one segment, `{name:path}` all that follow."""
    act: Permission | None
    """None: anybody may."""
    handler: Callable[[Any, Any], Awaitable[Any]]
    body: Any = None
    query: Any = None
    returns: Any = None
    waits: bool = False
    """Whether it may be long in answering; then a caller who hangs up cancels it."""
    error: Callable[[ApiError], bytes] | None = None
    """How its errors are written, where not like everybody else's."""
