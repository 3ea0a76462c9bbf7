"""The dialect of OpenAI's chat API, with its routes."""

from typing import Any

import msgspec

from leyden.server.gateway.dialects.base import (
    Dialect,
    DialectRequest,
    DialectRoute,
    ModelAccess,
    RouteRequest,
    model_route,
)
from leyden.server.gateway.dialects.chat.request import read_request
from leyden.server.gateway.dialects.chat.writer import ChatWriter
from leyden.server.gateway.dialects.openai import openai_error


async def _read(call: RouteRequest, access: ModelAccess) -> DialectRequest:
    generation, form = read_request(call.body)
    return DialectRequest(generation, lambda started: ChatWriter(generation, form, started))


async def _list_models(access: ModelAccess, request: RouteRequest) -> bytes:
    """List the models that the caller may use."""
    models = [_model(name) for name in await access.model_names()]
    return msgspec.json.encode({"object": "list", "data": models})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "leyden"}


_ROUTES = (DialectRoute("GET", "/models", _list_models), model_route(_model))
CHAT = Dialect("/chat/completions", _read, openai_error, extra_routes=_ROUTES)
