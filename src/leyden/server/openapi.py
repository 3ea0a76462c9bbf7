"""The OpenAPI description, made from the table of routes."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from leyden import __version__
from leyden.records import Id
from leyden.server.content import JSON, MSGPACK
from leyden.server.errors import ErrorBody
from leyden.server.http import Raw, Route

_REFS = "#/components/schemas/{name}"


def describe(routes: Sequence[Route]) -> Callable[[Any, Any], Awaitable[Raw]]:
    """A handler that answers with the description of the routes."""
    document = msgspec.json.encode(document_of(routes))

    async def openapi(service: Any, request: Any) -> Raw:
        """Describe this API."""
        return Raw(document, JSON)

    return openapi


def document_of(routes: Sequence[Route]) -> dict[str, Any]:
    """The description as a document."""
    ours = [route for route in routes if route.body is not Raw and route.returns is not Raw]
    types = [kind for route in ours for kind in (route.body, route.query, route.returns) if kind is not None]
    _, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REFS)
    paths: dict[str, dict[str, Any]] = {}
    for route in ours:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Leyden", "version": __version__, "description": "The control API of a Leyden server."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    answers = {"200": {"description": "Done", "content": _content(route.returns)}}
    if route.returns is None:
        answers = {"204": {"description": "Done"}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {**answers, "default": {"description": "Refused", "content": _content(ErrorBody, JSON)}},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    if route.act is None:
        operation["security"] = []
    return operation


def _content(kind: Any, *media: str) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFS)
    return {name: {"schema": schema} for name in media or (JSON, MSGPACK)}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    (schema,), _ = msgspec.json.schema_components([Id], ref_template=_REFS)
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name in re.findall(r"{(\w+)(?::path)?}", route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    _, components = msgspec.json.schema_components([route.query], ref_template=_REFS)
    properties = components[route.query.__name__]["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]
