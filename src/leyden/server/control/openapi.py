"""The OpenAPI description of every route, built from the table of routes."""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from leyden import __version__
from leyden.records import Id
from leyden.server.http.content import JSON, MSGPACK
from leyden.server.http.errors import ErrorBody
from leyden.server.http.responses import Raw, Route
from leyden.server.http.streaming import EVENT_STREAM

_REFS = "#/components/schemas/{name}"


def openapi_handler(routes: Sequence[Route]) -> Callable[[Any, Any], Awaitable[Raw]]:
    """Return a handler that answers with the description of the routes, itself included once it is among them."""
    document: bytes | None = None

    async def openapi(service: Any, request: Any) -> Raw:
        """Describe this API."""
        nonlocal document
        document = document or msgspec.json.encode(openapi_document(routes))
        return Raw(document, JSON)

    return openapi


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Build the description."""
    types = [kind for route in routes for kind in (route.body, route.query, route.returns) if _has_schema(kind)]
    _, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REFS)
    handlers = Counter(route.handler.__name__ for route in routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        shared = handlers[route.handler.__name__] > 1
        operation = {"operationId": _path_id(route) if shared else route.handler.__name__, **_operation(route)}
        paths.setdefault(openapi_path(route), {})[route.method.lower()] = operation
    description = "The API of a Leyden server: the control API, traces over OTLP, and model calls in each dialect."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Leyden", "version": __version__, "description": description},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def openapi_path(route: Route) -> str:
    """Return a route's path as OpenAPI writes it, which has no parameters of several segments."""
    return route.path.replace(":path}", "}")


def _path_id(route: Route) -> str:
    return re.sub(r"\W+", "_", f"{route.method.lower()}{openapi_path(route)}").rstrip("_")


def _has_schema(kind: Any) -> bool:
    """Whether the description has a schema for a type: not for raw content or free query parameters."""
    return kind is not None and kind is not Raw and kind != dict[str, str]


def _operation(route: Route) -> dict[str, Any]:
    answers = {"200": {"description": "Done", "content": _content(route.returns, route)}}
    if route.returns is None:
        answers = {"204": {"description": "Done"}}
    error = _any_content(JSON) if route.error is not None else _schema_content(ErrorBody, JSON)
    operation: dict[str, Any] = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {**answers, "default": {"description": "Refused", "content": error}},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body, route)}
        operation["requestBody"]["content"].pop(EVENT_STREAM, None)  # a stream is an answer only
    if route.permission is None:
        operation["security"] = []
    return operation


def _content(kind: Any, route: Route) -> dict[str, Any]:
    return _any_content(*route.media_types) if kind is Raw else _schema_content(kind, JSON, MSGPACK)


def _any_content(*media_types: str) -> dict[str, Any]:
    return {name: {"schema": {}} for name in media_types}


def _schema_content(kind: Any, *media_types: str) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFS)
    return {name: {"schema": schema} for name in media_types}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    (schema,), _ = msgspec.json.schema_components([Id], ref_template=_REFS)
    names = re.findall(r"{(\w+)}", openapi_path(route))
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if not _has_schema(route.query):
        return []
    _, components = msgspec.json.schema_components([route.query], ref_template=_REFS)
    properties = components[route.query.__name__]["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]
