"""The routes of the gateway: each dialect's paths, and its own way of writing errors."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

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
    return await _written(ask, chat.ChatWriter(ask, begun, usage), events)


async def create_message(service: Service, request: Request[Raw, Any]) -> Raw | Stream:
    """Answer a call of the Anthropic Messages API."""
    ask = messages.read(request.body.content)
    begun, events = await _begin(service, request, ask)
    return await _written(ask, messages.MessagesWriter(ask, begun), events)


async def count_tokens(service: Service, request: Request[Raw, Any]) -> Raw:
    """Say how many tokens the prompt of a message would have."""
    ask = messages.read_count(request.body.content)
    count = await _gateway(service).count(_caller(service, request), ask)
    return Raw(messages.count_body(count), JSON)


async def list_models(service: Service, request: Request[None, None]) -> Raw:
    """Say which models are served."""
    return Raw(chat.models(list(_gateway(service).policies)), JSON)


async def _begin(service: Service, request: Request[Any, Any], ask: Ask) -> tuple[Begun, AsyncGenerator[Event, None]]:
    """Begin to answer: what is wrong with a request is raised here, before any byte of an answer."""
    events = _gateway(service).answer(_caller(service, request), ask)
    begun = await anext(events)
    assert isinstance(begun, Begun)
    return begun, events


class _Writer(Protocol):
    async def whole(self, events: AsyncIterator[Event]) -> bytes: ...

    def stream(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]: ...


async def _written(ask: Ask, writer: _Writer, events: AsyncGenerator[Event, None]) -> Raw | Stream:
    return Stream(writer.stream(events)) if ask.stream else Raw(await writer.whole(events), JSON)


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

GATEWAY_ROUTES = [
    Route("POST", prefix + path, Act.CALL, handler, body=Raw, query=query, returns=Raw, waits=True, error=error)
    for prefix in ("/v1", "/role/{role}/v1")
    for path, handler, query, error in (
        ("/chat/completions", complete_chat, None, _OPENAI),
        ("/messages", create_message, _QUERY, _ANTHROPIC),
        ("/messages/count_tokens", count_tokens, _QUERY, _ANTHROPIC),
    )
] + [Route("GET", "/v1/models", Act.CALL, list_models, returns=Raw, error=_OPENAI)]
