"""The routes of the gateway: each dialect's paths, and its own way of writing errors."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from leyden.server.gateway.caller import Caller, identify
from leyden.server.gateway.dialects import anthropic, chat
from leyden.server.gateway.dialects.types import AnswerEvent, AnswerStarted, GenerationRequest
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.gateway import Gateway
from leyden.server.http import JSON, ApiError, Raw, Request, Route, Stream
from leyden.server.keys import Permission
from leyden.server.service import ServerContext


async def complete_chat(service: ServerContext, request: Request[Raw, None]) -> Raw | Stream:
    """Answer a call of the OpenAI chat API."""
    ask, usage = chat.read(request.body.content)
    begun, events = await _begin(service, request, ask)
    return await _written(ask, begun, chat.ChatWriter(ask, begun, usage), events)


async def create_message(service: ServerContext, request: Request[Raw, Any]) -> Raw | Stream:
    """Answer a call of the Anthropic Messages API."""
    ask = anthropic.read(request.body.content)
    begun, events = await _begin(service, request, ask)
    return await _written(ask, begun, anthropic.MessagesWriter(ask, begun), events)


async def count_tokens(service: ServerContext, request: Request[Raw, Any]) -> Raw:
    """Say how many tokens the prompt of a message would have."""
    ask = anthropic.read_count(request.body.content)
    count = await _gateway(service).count(_caller(service, request), ask)
    return Raw(anthropic.count_body(count), JSON)


async def list_models(service: ServerContext, request: Request[None, anthropic.ModelListQuery]) -> Raw:
    """Say which models are served, to each client in its dialect."""
    names = await _gateway(service).models(request.key.run)
    listed = anthropic.models(names, request.query) if _is_anthropic(request) else chat.models(names)
    return Raw(msgspec.json.encode(listed), JSON)


async def get_model(service: ServerContext, request: Request[None, Any]) -> Raw:
    """Say that a model is served."""
    name = request.path["model"]
    if not await _gateway(service).serves(name, request.key.run):
        raise GatewayError(ErrorKind.NO_MODEL, f"no model {name!r} is served here", "model")
    return Raw(msgspec.json.encode(anthropic.model(name) if _is_anthropic(request) else chat.model(name)), JSON)


async def pass_on(service: ServerContext, request: Request[Raw, Any]) -> Stream:
    """Pass a call of another kind of model (embeddings, speech) on to the upstream; it is not recorded."""
    path = request.path["path"]
    upstream = service.gateway.upstream if service.gateway is not None else None
    if path.partition("/")[0] not in _PASSED_ON:
        raise _nothing_at(path)
    if upstream is None:
        how = "start the server with --upstream URL to have it passed on to a service that has it"
        raise GatewayError(ErrorKind.NOTHING, f"/v1/{path} is not served here: {how}")
    _caller(service, request)
    return await upstream.pass_on(path, request.body, request.query, request.headers.get("accept", ""))


async def refuse(service: ServerContext, request: Request[Any, Any]) -> Raw:
    """Say that there is nothing."""
    raise _nothing_at(request.path["path"])


def _nothing_at(path: str) -> GatewayError:
    served = "/v1/chat/completions, /v1/messages and /v1/models are"
    passed = f"{', '.join(sorted(_PASSED_ON))} are passed on by POST where the server has an --upstream"
    return GatewayError(ErrorKind.NOTHING, f"/v1/{path} is not served: {served}; {passed}")


def _is_anthropic(request: Request[Any, Any]) -> bool:
    return "anthropic-version" in request.headers


async def _begin(
    service: ServerContext, request: Request[Any, Any], ask: GenerationRequest
) -> tuple[AnswerStarted, AsyncGenerator[AnswerEvent, None]]:
    """Begin to answer: what is wrong with a request is raised here, before any byte of an answer."""
    events = _gateway(service).answer(_caller(service, request), ask)
    begun = await anext(events)
    assert isinstance(begun, AnswerStarted)
    return begun, events


class _Writer(Protocol):
    async def whole(self, events: AsyncIterator[AnswerEvent]) -> bytes: ...

    def stream(self, events: AsyncGenerator[AnswerEvent, None]) -> AsyncGenerator[bytes, None]: ...


async def _written(
    ask: GenerationRequest, begun: AnswerStarted, writer: _Writer, events: AsyncGenerator[AnswerEvent, None]
) -> Raw | Stream:
    named = (("x-leyden-call", begun.id),)  # the id in the record, for whoever wants to reward it
    if ask.stream:
        return Stream(writer.stream(events), headers=named)
    return Raw(await writer.whole(events), JSON, named)


def _caller(service: ServerContext, request: Request[Any, Any]) -> Caller:
    return identify(service.leases, request.key, request.headers, request.path.get("role"))


def _gateway(service: ServerContext) -> Gateway:
    if service.gateway is None:
        raise GatewayError(ErrorKind.NO_MODEL, "this server serves no model", "model")
    return service.gateway


def _in(dialect: Callable[[GatewayError], bytes]) -> Callable[[ApiError], bytes]:
    """Errors of any part of the server, written in a dialect."""

    def written(error: ApiError) -> bytes:
        troubles: dict[str, ErrorKind] = {str(trouble): trouble for trouble in ErrorKind}
        by_status = {401: ErrorKind.BAD_KEY, 403: ErrorKind.FORBIDDEN, 404: ErrorKind.NO_MODEL, 429: ErrorKind.BUSY}
        other = by_status.get(error.status, ErrorKind.INVALID if error.status < 500 else ErrorKind.FAILED)
        wait = dict(error.headers).get("retry-after")
        trouble = troubles.get(error.reason, other)
        return dialect(GatewayError(trouble, error.message, error.field, float(wait) if wait else None))

    return written


_OPENAI, _ANTHROPIC = _in(chat.error_body), _in(anthropic.error_body)
_QUERY = dict[str, str]  # Anthropic's clients may add ?beta=true
_PASSED_ON = frozenset({"audio", "classify", "embeddings", "images", "moderations", "pooling", "rerank", "score"})
"""What calls a model and leaves nothing behind: that is what an agent's key is for. Whatever else an upstream has
(files, jobs, adapters to load) is for those who hold its key, and other dialects of chat would escape the record."""

GATEWAY_ROUTES = [
    route
    for prefix in ("/v1", "/role/{role}/v1")
    for route in (
        *(
            Route(
                "POST",
                prefix + path,
                Permission.CALL,
                handler,
                body=Raw,
                query=query,
                returns=Raw,
                waits=True,
                error=error,
            )
            for path, handler, query, error in (
                ("/chat/completions", complete_chat, _QUERY, _OPENAI),
                ("/messages", create_message, _QUERY, _ANTHROPIC),
                ("/messages/count_tokens", count_tokens, _QUERY, _ANTHROPIC),
                ("/{path*}", pass_on, _QUERY, _OPENAI),
            )
        ),
        *(
            Route(method, prefix + path, Permission.CALL, handler, query=query, returns=Raw, error=_OPENAI)
            for method, path, handler, query in (
                ("GET", "/models", list_models, anthropic.ModelListQuery),
                ("GET", "/models/{model*}", get_model, _QUERY),
                ("GET", "/{path*}", refuse, _QUERY),
                ("DELETE", "/{path*}", refuse, _QUERY),
            )
        ),
    )
]
