"""Makes routes of declared endpoints. mypy checks that a handler takes and returns what its endpoint declares."""

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from leyden.api.endpoint import Endpoint
from leyden.server.control.keys import Key
from leyden.server.http.responses import Request, Route
from leyden.server.service import ServerContext
from leyden.store.store import Store

P = ParamSpec("P")
R = TypeVar("R")


def serve(endpoint: Endpoint[P, R], handler: Callable[Concatenate[ServerContext, Key, P], Awaitable[R]]) -> Route:
    """Answer an endpoint with a function of the server, the key of the request and its arguments."""

    answer: Callable[..., Awaitable[R]] = handler

    async def handle(service: ServerContext, request: Request[Any, Any]) -> R:
        content = request.query if endpoint.body is None else request.body
        return await answer(service, request.key, *endpoint.arguments(request.path, content))

    handle.__name__, handle.__doc__ = endpoint.name, endpoint.summary
    return Route(
        *(endpoint.method, endpoint.path, endpoint.permission, handle, endpoint.body, endpoint.query),
        returns=endpoint.returns if endpoint.returns is not type(None) else None,
        waits=endpoint.waits,
    )


def serve_query(endpoint: Endpoint[P, R], query: Callable[Concatenate[Connection, P], R]) -> Route:
    """Answer an endpoint with a query of the store."""

    async def handler(service: ServerContext, key: Key, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await service.store.read(query, *args, **kwargs)

    return serve(endpoint, handler)


def serve_store(endpoint: Endpoint[P, R], operation: Callable[Concatenate[Store, P], Awaitable[R]]) -> Route:
    """Answer an endpoint with a method of the store."""

    async def handler(service: ServerContext, key: Key, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await operation(service.store, *args, **kwargs)

    return serve(endpoint, handler)


def serve_count(
    endpoint: Endpoint[P, R], operation: Callable[Concatenate[Store, P], Awaitable[int]], reply: Callable[[int], R]
) -> Route:
    """Answer an endpoint with the number of records that a method of the store has changed."""

    async def handler(service: ServerContext, key: Key, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return reply(await operation(service.store, *args, **kwargs))

    return serve(endpoint, handler)
