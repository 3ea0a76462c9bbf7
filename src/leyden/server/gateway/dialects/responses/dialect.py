"""The dialect of OpenAI's Responses API."""

from collections.abc import Sequence
from typing import Any

from leyden.server.gateway.dialects.base import DialectRequest, DialectRoute, ModelAccess
from leyden.server.gateway.dialects.encoding import decode_body
from leyden.server.gateway.dialects.openai_error import openai_error
from leyden.server.gateway.dialects.responses.items import read_items
from leyden.server.gateway.dialects.responses.request import (
    PromptParameters,
    ResponseParameters,
    check_supported,
    read_format,
)
from leyden.server.gateway.dialects.responses.tools import ToolTable
from leyden.server.gateway.dialects.responses.writer import ResponseWriter
from leyden.server.gateway.dialects.types import GenerationRequest, Message
from leyden.server.gateway.errors import ErrorKind, GatewayError


class ResponsesDialect:
    """Serves /v1/responses."""

    path = "/responses"

    @property
    def extra_routes(self) -> Sequence[DialectRoute]:
        """The routes beneath /v1/responses."""
        return ()

    async def read(self, body: bytes, access: ModelAccess) -> DialectRequest:
        """Read a request for a response."""
        request, document = decode_body(body, ResponseParameters)
        check_supported(request)
        tools, choice = ToolTable.read(request.tools or ()).choice(request.tool_choice)
        generation = GenerationRequest(
            model=request.model,
            messages=tuple(read_messages(request, tools)),
            tools=tools.functions,
            tool_choice=choice,
            sampling=request.sampling,
            stream=bool(request.stream),
            top_logprobs=request.logprobs,
            format=read_format(request.text),
            request=_recorded(document),
        )
        return DialectRequest(generation, lambda started: ResponseWriter(started.id, request, tools.given))

    def write_error(self, error: GatewayError) -> bytes:
        """Write an error as OpenAI's SDKs read it."""
        return openai_error(error)


def read_messages(request: PromptParameters, tools: ToolTable) -> list[Message]:
    """Return the messages of a request: its instructions, then its input."""
    messages: list[Message] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input or ()
    messages += read_items(items, tools)
    if not messages:
        raise GatewayError(ErrorKind.INVALID, "there is nothing to answer: send input", "input")
    return messages


def _recorded(document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that the record keeps beside its messages and tools."""
    return {name: value for name, value in document.items() if name not in ("input", "instructions", "tools")}
