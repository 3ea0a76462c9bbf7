"""The dialect of Anthropic's Messages API, with its routes."""

from collections.abc import Sequence

import msgspec

from leyden.server.gateway.dialects.base import DialectRequest, DialectRoute, ModelAccess, RouteRequest
from leyden.server.gateway.dialects.encoding import decode_body
from leyden.server.gateway.dialects.messages.errors import anthropic_error
from leyden.server.gateway.dialects.messages.models import get_model, list_models
from leyden.server.gateway.dialects.messages.request import CountRequest, read_prompt, read_request
from leyden.server.gateway.dialects.messages.writer import MessagesWriter
from leyden.server.gateway.errors import GatewayError


class AnthropicDialect:
    """Serves /v1/messages, its token counts, and /v1/models in Anthropic's format."""

    path = "/messages"

    @property
    def extra_routes(self) -> Sequence[DialectRoute]:
        """Count tokens; list and describe the models for clients that send Anthropic's version header."""
        return (
            DialectRoute("POST", "/messages/count_tokens", _count_tokens),
            DialectRoute("GET", "/models", list_models, header="anthropic-version"),
            DialectRoute("GET", "/models/{model:path}", get_model, header="anthropic-version"),
        )

    async def read(self, body: bytes, access: ModelAccess) -> DialectRequest:
        """Read a request for a message."""
        request = read_request(body)
        return DialectRequest(request, lambda started: MessagesWriter(request, started))

    def write_error(self, error: GatewayError) -> bytes:
        """Write an error as Anthropic's SDKs read it."""
        return anthropic_error(error)


async def _count_tokens(access: ModelAccess, request: RouteRequest) -> bytes:
    """Count the tokens of a prompt."""
    counted, _ = decode_body(request.body, CountRequest, dotted=True)
    return msgspec.json.encode({"input_tokens": await access.count_tokens(read_prompt(counted))})
