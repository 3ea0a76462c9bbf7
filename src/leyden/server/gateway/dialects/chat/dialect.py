"""The dialect of OpenAI's chat API, with its routes."""

from collections.abc import Sequence
from typing import Any

import msgspec

from leyden.server.gateway.dialects.base import DialectRequest, DialectRoute, ModelAccess, RouteRequest, named_model
from leyden.server.gateway.dialects.chat.request import read_request
from leyden.server.gateway.dialects.chat.writer import ChatWriter
from leyden.server.gateway.dialects.openai import openai_error
from leyden.server.gateway.errors import GatewayError


class ChatDialect:
    """Serves /v1/chat/completions, and /v1/models in OpenAI's format."""

    path = "/chat/completions"
    header = None

    @property
    def extra_routes(self) -> Sequence[DialectRoute]:
        """List and describe the models."""
        return (DialectRoute("GET", "/models", _list_models), DialectRoute("GET", "/models/{model:path}", _get_model))

    async def read(self, call: RouteRequest, access: ModelAccess) -> DialectRequest:
        """Read a chat completion request."""
        generation, form = read_request(call.body)
        return DialectRequest(generation, lambda started: ChatWriter(generation, form, started))

    def write_error(self, error: GatewayError) -> bytes:
        """Write an error as OpenAI's SDKs read it."""
        return openai_error(error)


async def _list_models(access: ModelAccess, request: RouteRequest) -> bytes:
    """List the models that the caller may use."""
    models = [_model(name) for name in await access.model_names()]
    return msgspec.json.encode({"object": "list", "data": models})


async def _get_model(access: ModelAccess, request: RouteRequest) -> bytes:
    """Describe a model."""
    return msgspec.json.encode(_model(await named_model(access, request)))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "leyden"}
