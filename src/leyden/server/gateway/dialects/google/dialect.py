"""The dialect of Google's Gemini API, with its routes."""

from typing import Any

import msgspec
from msgspec.structs import replace

from leyden.server.gateway.dialects.base import (
    Dialect,
    DialectRequest,
    DialectRoute,
    ModelAccess,
    RouteRequest,
    model_route,
)
from leyden.server.gateway.dialects.google.request import read_count, read_request
from leyden.server.gateway.dialects.google.writer import GoogleWriter, google_error
from leyden.server.gateway.errors import invalid


async def _read(call: RouteRequest, access: ModelAccess) -> DialectRequest:
    request, shows_thoughts = read_request(call.body, call.path["model"])
    return DialectRequest(request, lambda started: GoogleWriter(request, shows_thoughts, started))


async def _read_streamed(call: RouteRequest, access: ModelAccess) -> DialectRequest:
    if call.query.get("alt") != "sse":
        raise invalid("streams are server-sent events: add ?alt=sse to the URL", "alt")
    read = await _read(call, access)
    return replace(read, generation=replace(read.generation, stream=True))


async def _count_tokens(access: ModelAccess, request: RouteRequest) -> bytes:
    """Count the tokens of a prompt."""
    counted = await access.count_tokens(read_count(request.body, request.path["model"]))
    return msgspec.json.encode({"totalTokens": counted})


async def _list_models(access: ModelAccess, request: RouteRequest) -> bytes:
    """List the models that the caller may use."""
    return msgspec.json.encode({"models": [_model(name) for name in await access.model_names()]})


def _model(name: str) -> dict[str, Any]:
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}


_HEADER = "x-goog-api-key"
_ROUTES = (
    DialectRoute("POST", "/models/{model:path}:countTokens", _count_tokens),
    DialectRoute("GET", "/models", _list_models),
    model_route(_model),
)
GOOGLE = (
    Dialect("/models/{model:path}:generateContent", _read, google_error, _HEADER, _ROUTES),
    Dialect("/models/{model:path}:streamGenerateContent", _read_streamed, google_error, _HEADER),
)
"""The two methods that generate: the path says whether the answer is streamed."""
