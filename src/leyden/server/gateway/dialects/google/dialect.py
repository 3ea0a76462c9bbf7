"""The dialect of Google's Gemini API, with its routes."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from leyden.server.gateway.dialects.base import DialectRequest, DialectRoute, ModelAccess, RouteRequest, named_model
from leyden.server.gateway.dialects.google.request import read_count, read_request
from leyden.server.gateway.dialects.google.writer import GoogleWriter, google_error
from leyden.server.gateway.errors import GatewayError, invalid

_METHODS = ("generateContent", "streamGenerateContent")


class GoogleDialect:
    """Serves one of the two methods that generate; the path says whether the answer is streamed."""

    header = "x-goog-api-key"

    def __init__(self, method: Literal["generateContent", "streamGenerateContent"]) -> None:
        self.path = f"/models/{{model:path}}:{method}"
        self._streams = method == "streamGenerateContent"

    @property
    def extra_routes(self) -> Sequence[DialectRoute]:
        """Count tokens; list and describe the models in Google's format."""
        if self._streams:
            return ()
        return (
            DialectRoute("POST", "/models/{model:path}:countTokens", _count_tokens),
            DialectRoute("GET", "/models", _list_models),
            DialectRoute("GET", "/models/{model:path}", _get_model),
        )

    async def read(self, call: RouteRequest, access: ModelAccess) -> DialectRequest:
        """Read a request to generate content."""
        if self._streams and call.query.get("alt") != "sse":
            raise invalid("streams are server-sent events: add ?alt=sse to the URL", "alt")
        request, shows_thoughts = read_request(call.body, call.path["model"])
        generation = replace(request, stream=self._streams)
        return DialectRequest(generation, lambda started: GoogleWriter(generation, shows_thoughts, started))

    def write_error(self, error: GatewayError) -> bytes:
        """Write an error as Google's SDKs read it."""
        return google_error(error)


async def _count_tokens(access: ModelAccess, request: RouteRequest) -> bytes:
    """Count the tokens of a prompt."""
    counted = await access.count_tokens(read_count(request.body, request.path["model"]))
    return msgspec.json.encode({"totalTokens": counted})


async def _list_models(access: ModelAccess, request: RouteRequest) -> bytes:
    """List the models that the caller may use."""
    return msgspec.json.encode({"models": [_model(name) for name in await access.model_names()]})


async def _get_model(access: ModelAccess, request: RouteRequest) -> bytes:
    """Describe a model."""
    return msgspec.json.encode(_model(await named_model(access, request)))


def _model(name: str) -> dict[str, Any]:
    methods = [*_METHODS, "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
