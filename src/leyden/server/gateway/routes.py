"""The HTTP routes of the gateway: those of every dialect, and the paths that are passed on to the upstream."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from leyden.api.endpoint import Permission
from leyden.server.gateway.calls.batch import merge_answers
from leyden.server.gateway.calls.caller import Caller, identify
from leyden.server.gateway.dialects.base import AnswerWriter, Dialect, DialectRoute, RouteRequest, StoredAnswer
from leyden.server.gateway.dialects.google.dialect import GOOGLE
from leyden.server.gateway.dialects.registry import BASES, DIALECTS
from leyden.server.gateway.dialects.types import AnswerEvent, AnswerStarted, GenerationRequest, PromptTokens
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.gateway import Gateway
from leyden.server.http.content import JSON
from leyden.server.http.errors import ApiError
from leyden.server.http.responses import REQUEST_ID_HEADERS, Raw, Request, Route
from leyden.server.http.streaming import EVENT_STREAM, StreamResponse
from leyden.server.service import ServerContext

Handler = Callable[[ServerContext, Request[Any, Any]], Awaitable[Raw | StreamResponse]]

_QUERY = dict[str, str]  # clients may add other parameters, such as Anthropic's ?beta=true
_FORWARDED = frozenset({"audio", "classify", "embeddings", "images", "moderations", "pooling", "rerank", "score"})
"""Paths that call a model and leave nothing behind, which is all that an agent's key is for. Other paths of an upstream
(files, jobs, adapters) are for those who hold its key, and other dialects of chat would bypass the record."""

_PATHS = frozenset({"/models", *(dialect.path for dialect in DIALECTS)})
_KIND_OF_REASON: dict[str, ErrorKind] = {str(kind): kind for kind in ErrorKind}
_KIND_OF_STATUS = {
    401: ErrorKind.BAD_KEY,
    403: ErrorKind.FORBIDDEN,
    404: ErrorKind.NO_MODEL,
    429: ErrorKind.RATE_LIMITED,
}


def generation_handler(dialect: Dialect) -> Handler:
    """Return the handler that answers the model calls of a dialect."""

    async def generate(service: ServerContext, request: Request[Raw, Any]) -> Raw | StreamResponse:
        """Answer a model call, whole or streamed."""
        access = _RequestAccess(service, request)
        parsed = await dialect.read(RouteRequest(request.path, request.query, request.body.content), access)
        answers = [access.gateway.answer(access.caller, wanted) for wanted in (parsed.generation, *parsed.further)]
        events = answers[0] if not parsed.further else merge_answers(answers, parsed.generation.n)
        started = await anext(events)  # raises what is wrong with the request, before any byte of an answer
        assert isinstance(started, AnswerStarted)
        writer = parsed.writer(started)
        # The id in the record, by which a caller can reward the call, is the one that SDKs show for the request.
        headers = tuple((name, started.id) for name in ("x-leyden-call", *REQUEST_ID_HEADERS))
        if parsed.generation.stream:
            return StreamResponse(_stream(writer, events), headers=dict(headers))
        async with aclosing(events):
            made = [event async for event in events]
        if any(isinstance(event, PromptTokens) for event in made):  # millions of logprobs, with as many prompts
            return Raw(await asyncio.to_thread(writer.whole, made), JSON, headers)
        return Raw(writer.whole(made), JSON, headers)

    return generate


def extra_handler(candidates: Mapping[str | None, DialectRoute]) -> Handler:
    """Return the handler of a path that several dialects may share; a request's headers decide which one answers.

    `candidates` are by the header of their dialect; None is the one of clients that send none of these.
    """
    usual = candidates.get(None) or next(iter(candidates.values()))

    async def answer(service: ServerContext, request: Request[Any, Any]) -> Raw:
        route = next((route for header, route in candidates.items() if header in request.headers), usual)
        body = request.body.content if request.body is not None else b""
        access = _RequestAccess(service, request)
        return Raw(await route.handler(access, RouteRequest(request.path, request.query, body)), JSON)

    answer.__doc__ = usual.handler.__doc__  # the summary in the OpenAPI description
    return answer


async def forward(service: ServerContext, request: Request[Raw, Any]) -> StreamResponse:
    """Pass a call of another kind of model (embeddings, speech) on to the upstream; it is not recorded."""
    path, gateway = request.path["path"], service.gateway
    if path.partition("/")[0] not in _FORWARDED:
        raise _not_served(path)
    if gateway is None or gateway.upstream is None:
        how = "start the server with --upstream URL to have it passed on to a service that has it"
        raise GatewayError(ErrorKind.NOT_FOUND, f"/v1/{path} is not served here: {how}")
    call, accept = await gateway.start_unrecorded(_caller(service, request)), request.headers.get("accept", "")
    return await gateway.upstream.forward(path, request.body, request.query, accept, call)


async def refuse(service: ServerContext, request: Request[Any, Any]) -> Raw:
    """Answer 404 on a path that is not served."""
    model = request.path.get("model")  # with a method, as in Google's models/M:embedContent
    raise _not_served(f"models/{model}" if model else request.path["path"])


def base_url_hint(path: str) -> str:
    """Return what to change in the base URL of a client that sends requests to a path; empty if there is no sign."""
    if path in _PATHS:
        return f": add /v1 to the client's base URL, /v1{path} is served"
    return ": remove /v1 from the client's base URL" if path.startswith(("/v1/v1/", "/v1/v1beta/")) else ""


def unrouted_error(error: ApiError, path: str, headers: Mapping[str, str]) -> bytes | None:
    """Write the error of a path outside of all routes in the dialect of its client; None if it speaks none."""
    dialect = _dialect_of(headers, DIALECTS[0] if path in _PATHS else None)
    return None if dialect is None else _write_error(dialect, error)


def _not_served(path: str) -> GatewayError:
    if hint := base_url_hint(f"/v1/{path}"):
        return GatewayError(ErrorKind.NOT_FOUND, f"/v1/{path} is not served{hint}")
    served = ", ".join(f"/v1{dialect.path}" for dialect in DIALECTS).replace(":path", "")
    forwarded = f"{', '.join(sorted(_FORWARDED))} are passed on by POST if the server has an --upstream"
    return GatewayError(ErrorKind.NOT_FOUND, f"/v1/{path} is not served: {served} and /v1/models are; {forwarded}")


class _RequestAccess:
    """The gateway as the caller of one request may use it; implements `ModelAccess`."""

    def __init__(self, service: ServerContext, request: Request[Any, Any]) -> None:
        self._service, self._request = service, request

    @property
    def gateway(self) -> Gateway:
        if self._service.gateway is None:
            raise GatewayError(ErrorKind.NO_MODEL, "this server serves no model", "model")
        return self._service.gateway

    @property
    def caller(self) -> Caller:
        return _caller(self._service, self._request)

    async def count_tokens(self, request: GenerationRequest) -> int:
        return await self.gateway.count_tokens(self.caller, request)

    async def model_names(self) -> list[str]:
        return await self.gateway.model_names(self._request.key.run)

    async def serves(self, model: str) -> bool:
        return await self.gateway.serves(model, self._request.key.run)

    async def stored_answer(self, call: str) -> StoredAnswer | None:
        return await self.gateway.stored_answer(self.caller, call)

    async def delete_answer(self, call: str) -> None:
        await self.gateway.delete_answer(self.caller, call)


def _caller(service: ServerContext, request: Request[Any, Any]) -> Caller:
    role, direct = request.path.get("role"), service.options.direct
    return identify(service.leases, request.key, request.headers, role, direct)


async def _stream(writer: AnswerWriter, events: AsyncGenerator[AnswerEvent, None]) -> AsyncGenerator[bytes, None]:
    """Write events as they come; an error ends the stream in the dialect's format."""
    try:
        yield writer.stream_start()
        async for event in events:
            if chunk := writer.stream_event(event):
                yield chunk
    except GatewayError as error:
        yield writer.stream_error(error)
        return
    finally:
        await events.aclose()
    if chunk := writer.stream_end():
        yield chunk


def _dialect_of(headers: Mapping[str, str], usual: Dialect | None) -> Dialect | None:
    """Return the dialect of the client that sent a request; the usual one if its headers do not say."""
    return next((dialect for dialect in DIALECTS if dialect.header is not None and dialect.header in headers), usual)


def _write_error(dialect: Dialect, error: ApiError) -> bytes:
    """Write an error of any part of the server in a dialect."""
    other = _KIND_OF_STATUS.get(error.status, ErrorKind.INVALID if error.status < 500 else ErrorKind.FAILED)
    wait = dict(error.headers).get("retry-after")
    kind = _KIND_OF_REASON.get(error.reason, other)
    return dialect.write_error(GatewayError(kind, error.message, error.field, float(wait) if wait else None))


def _route(method: str, path: str, handler: Handler, dialect: Dialect) -> Route:
    def write_error(error: ApiError, headers: Mapping[str, str]) -> bytes:
        own = path.endswith(dialect.path)
        return _write_error(dialect if own else _dialect_of(headers, dialect) or dialect, error)

    posts = method == "POST"
    media_types = ("*/*",) if handler is forward else (JSON, EVENT_STREAM) if path.endswith(dialect.path) else (JSON,)
    return Route(
        method,
        path,
        Permission.CALL_MODELS,
        handler,
        body=Raw if posts else None,
        query=_QUERY,
        returns=Raw,
        waits=posts,
        error=write_error,
        request_ids=True,
        key_in_query=dialect in GOOGLE,
        media_types=media_types,
    )


def _routes(base: str) -> Iterator[tuple[str, str, Handler, Dialect]]:
    """Yield method, path, handler and the dialect that writes errors."""
    shared: dict[tuple[str, str], dict[str | None, tuple[DialectRoute, Dialect]]] = {}
    for dialect in BASES[base]:
        yield "POST", base + dialect.path, generation_handler(dialect), dialect
        for route in dialect.extra_routes:
            shared.setdefault((route.method, route.path), {})[dialect.header] = route, dialect
    for (method, path), candidates in shared.items():
        handler = extra_handler({header: route for header, (route, _) in candidates.items()})
        yield method, base + path, handler, next(iter(candidates.values()))[1]
    yield "POST", base + "/models/{model:path}", refuse, BASES[base][-1]
    if base == "/v1":
        yield "POST", "/v1/{path:path}", forward, DIALECTS[0]
        yield "GET", "/v1/{path:path}", refuse, DIALECTS[0]
        yield "DELETE", "/v1/{path:path}", refuse, DIALECTS[0]


GATEWAY_ROUTES = [
    _route(method, prefix + path, handler, dialect)
    for prefix in ("", "/role/{role}")
    for base in BASES
    for method, path, handler, dialect in _routes(base)
]
