"""What an API dialect consists of: its routes, how it reads a request, and how it writes answers and errors.

Reading and writing are pure. The gateway's routes do the I/O: they read a request, generate, and pass each
`AnswerEvent` to the request's writer.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from leyden.records import Call
from leyden.server.gateway.dialects.types import AnswerEvent, AnswerStarted, GenerationRequest, Message
from leyden.server.gateway.errors import GatewayError, no_model


class AnswerWriter(Protocol):
    """Writes the answer to one request, whole or as server-sent events. It may keep state between events."""

    def whole(self, events: Sequence[AnswerEvent]) -> bytes:
        """Return the JSON body for all the events of an answer."""

    def stream_start(self) -> bytes:
        """Return what a stream sends before the first event, if anything."""
        return b""

    def stream_event(self, event: AnswerEvent) -> bytes:
        """Return what a stream sends for one event; empty if it sends nothing."""

    def stream_end(self) -> bytes:
        """Return what a stream sends after the last event, if anything; not called after an error."""
        return b""

    def stream_error(self, error: GatewayError) -> bytes:
        """Return the last event of a stream that fails."""


class DialectRequest(Struct, frozen=True):
    """A request that a dialect has read. The writer keeps what only the dialect needs to know to answer it."""

    generation: GenerationRequest
    writer: Callable[[AnswerStarted], AnswerWriter]
    further: tuple[GenerationRequest, ...] = ()
    """The requests of the other prompts, if one request has several. Their choices are numbered on."""


class StoredAnswer(Struct, frozen=True):
    """A call in the record, with all that a dialect needs to write its answer again or to continue it."""

    call: Call
    messages: tuple[Message, ...]
    tools: tuple[Any, ...]
    reasoning_tokens: int = 0


class ModelAccess(Protocol):
    """The queries that a dialect may send to the gateway for the caller of one request."""

    async def count_tokens(self, request: GenerationRequest) -> int:
        """Return the number of tokens in the prompt of a request."""

    async def model_names(self) -> list[str]:
        """Return the model names that the caller may use."""

    async def serves(self, model: str) -> bool:
        """Return whether a request for this model name would be answered."""

    async def stored_answer(self, call: str) -> StoredAnswer | None:
        """Return a call of the caller's attempt; None if there is none, or the caller deleted its answer."""

    async def delete_answer(self, call: str) -> None:
        """Delete the answer of a call for the caller; the call stays in the record."""


class RouteRequest(Struct, frozen=True):
    """An HTTP request to an extra route of a dialect."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes


class DialectRoute(Struct, frozen=True):
    """A route of a dialect beside the one that generates: `handler` returns the JSON body of the answer."""

    method: str
    path: str
    """Beneath /v1. `{name}` matches one segment, `{name:path}` all that follow."""
    handler: Callable[[ModelAccess, RouteRequest], Awaitable[bytes]]
    """The first line of its docstring is the summary in the OpenAPI description."""


def model_route(describe: Callable[[str], dict[str, Any]]) -> DialectRoute:
    """Return the route of one model, as an API describes it."""

    async def get_model(access: ModelAccess, request: RouteRequest) -> bytes:
        """Describe a model."""
        name = request.path["model"]
        if not await access.serves(name):
            raise no_model(name)
        return msgspec.json.encode(describe(name))

    return DialectRoute("GET", "/models/{model:path}", get_model)


class Dialect(Struct, frozen=True):
    """One API by which agents call models."""

    path: str
    """The path beneath /v1 of the route that generates. It takes POST."""
    read: Callable[[RouteRequest, ModelAccess], Awaitable[DialectRequest]]
    """Reads a request to `path`; raises `GatewayError` for one that cannot be served."""
    write_error: Callable[[GatewayError], bytes]
    """Returns the JSON body of an error response."""
    header: str | None = None
    """A header that only clients of this API send: it tells whose request it is on a path that APIs share."""
    extra_routes: tuple[DialectRoute, ...] = ()
    """The other routes of the API, if any: model lists, token counts, stored answers."""
