"""The routes of the gateway: each dialect's paths, and its own way of writing errors."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from leyden.server.gateway import chat, messages
from leyden.server.gateway.ask import Ask, Begun, Event
from leyden.server.gateway.caller import Caller, identify
from leyden.server.gateway.errors import GatewayError, Trouble
from leyden.server.gateway.gateway import Gateway
from leyden.server.http import JSON, ApiError, Raw, Request, Route, Stream
from leyden.server.keys import Act
from leyden.server.service import Service


async def complete_chat(service: Service, request: Request[Raw, None]) -> Raw | Stream:
    """Answer a call of the OpenAI chat API."""
    ask, usage = chat.read(request.body.content)
    begun, events = await _begin(service, request, ask)
    return await _written(ask, begun, chat.ChatWriter(ask, begun, usage), events)


async def create_message(service: Service, request: Request[Raw, Any]) -> Raw | Stream:
    """Answer a call of the Anthropic Messages API."""
    ask = messages.read(request.body.content)
    begun, events = await _begin(service, request, ask)
    return await _written(ask, begun, messages.MessagesWriter(ask, begun), events)


async def count_tokens(service: Service, request: Request[Raw, Any]) -> Raw:
    """Say how many tokens the prompt of a message would have."""
    ask = messages.read_count(request.body.content)
    count = await _gateway(service).count(_caller(service, request), ask)
    return Raw(messages.count_body(count), JSON)


async def list_models(service: Service, request: Request[None, messages.Window]) -> Raw:
    """Say which models are served, to each client in its dialect."""
    names = await _gateway(service).models(request.key.run)
    listed = messages.models(names, request.query) if _is_anthropic(request) else chat.models(names)
    return Raw(msgspec.json.encode(listed), JSON)


async def get_model(service: Service, request: Request[None, Any]) -> Raw:
    """Say that a model is served."""
    name = request.path["model"]
    if not await _gateway(service).serves(name, request.key.run):
        raise GatewayError(Trouble.NO_MODEL, f"no model {name!r} is served here", "model")
    return Raw(msgspec.json.encode(messages.model(name) if _is_anthropic(request) else chat.model(name)), JSON)


async def pass_on(service: Service, request: Request[Raw, Any]) -> Stream:
    """Pass a call of another kind of model (embeddings, speech) on to the upstream; it is not recorded."""
    path = request.path["path"]
    upstream = service.gateway.upstream if service.gateway is not None else None
    if path.partition("/")[0] not in _PASSED_ON:
        raise _nothing_at(path)
    if upstream is None:
        how = "start the server with --upstream URL to have it passed on to a service that has it"
        raise GatewayError(Trouble.NOTHING, f"/v1/{path} is not served here: {how}")
    _caller(service, request)
    return await upstream.pass_on(path, request.body, request.query, request.headers.get("accept", ""))


async def refuse(service: Service, request: Request[Any, Any]) -> Raw:
    """Say that there is nothing."""
    raise _nothing_at(request.path["path"])


def _nothing_at(path: str) -> GatewayError:
    served = "/v1/chat/completions, /v1/messages and /v1/models are"
    passed = f"{', '.join(sorted(_PASSED_ON))} are passed on by POST where the server has an --upstream"
    return GatewayError(Trouble.NOTHING, f"/v1/{path} is not served: {served}; {passed}")


def _is_anthropic(request: Request[Any, Any]) -> bool:
    return "anthropic-version" in request.headers


async def _begin(service: Service, request: Request[Any, Any], ask: Ask) -> tuple[Begun, AsyncGenerator[Event, None]]:
    """Begin to answer: what is wrong with a request is raised here, before any byte of an answer."""
    events = _gateway(service).answer(_caller(service, request), ask)
    begun = await anext(events)
    assert isinstance(begun, Begun)
    return begun, events


class _Writer(Protocol):
    async def whole(self, events: AsyncIterator[Event]) -> bytes: ...

    def stream(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]: ...


async def _written(ask: Ask, begun: Begun, writer: _Writer, events: AsyncGenerator[Event, None]) -> Raw | Stream:
    named = (("x-leyden-call", begun.id),)  # the id in the record, for whoever wants to reward it
    if ask.stream:
        return Stream(writer.stream(events), headers=named)
    return Raw(await writer.whole(events), JSON, named)


def _caller(service: Service, request: Request[Any, Any]) -> Caller:
    return identify(service.leases, request.key, request.headers, request.path.get("role"))


def _gateway(service: Service) -> Gateway:
    if service.gateway is None:
        raise GatewayError(Trouble.NO_MODEL, "this server serves no model", "model")
    return service.gateway


def _in(dialect: Callable[[GatewayError], bytes]) -> Callable[[ApiError], bytes]:
    """Errors of any part of the server, written in a dialect."""

    def written(error: ApiError) -> bytes:
        troubles: dict[str, Trouble] = {str(trouble): trouble for trouble in Trouble}
        by_status = {401: Trouble.BAD_KEY, 403: Trouble.FORBIDDEN, 404: Trouble.NO_MODEL, 429: Trouble.BUSY}
        other = by_status.get(error.status, Trouble.INVALID if error.status < 500 else Trouble.FAILED)
        wait = dict(error.headers).get("retry-after")
        trouble = troubles.get(error.reason, other)
        return dialect(GatewayError(trouble, error.message, error.field, float(wait) if wait else None))

    return written


_OPENAI, _ANTHROPIC = _in(chat.error_body), _in(messages.error_body)
_QUERY = dict[str, str]  # Anthropic's clients may add ?beta=true
_PASSED_ON = frozenset({"audio", "classify", "embeddings", "images", "moderations", "pooling", "rerank", "score"})
"""What calls a model and leaves nothing behind: that is what an agent's key is for. Whatever else an upstream has
(files, jobs, adapters to load) is for those who hold its key, and other dialects of chat would escape the record."""

GATEWAY_ROUTES = [
    route
    for prefix in ("/v1", "/role/{role}/v1")
    for route in (
        *(
            Route("POST", prefix + path, Act.CALL, handler, body=Raw, query=query, returns=Raw, waits=True, error=error)
            for path, handler, query, error in (
                ("/chat/completions", complete_chat, _QUERY, _OPENAI),
                ("/messages", create_message, _QUERY, _ANTHROPIC),
                ("/messages/count_tokens", count_tokens, _QUERY, _ANTHROPIC),
                ("/{path*}", pass_on, _QUERY, _OPENAI),
            )
        ),
        *(
            Route(method, prefix + path, Act.CALL, handler, query=query, returns=Raw, error=_OPENAI)
            for method, path, handler, query in (
                ("GET", "/models", list_models, messages.Window),
                ("GET", "/models/{model*}", get_model, _QUERY),
                ("GET", "/{path*}", refuse, _QUERY),
                ("DELETE", "/{path*}", refuse, _QUERY),
            )
        ),
    )
]
