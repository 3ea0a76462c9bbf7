"""The dialect of OpenAI's Responses API, with its routes."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from leyden.server.gateway.dialects.base import Dialect, DialectRequest, DialectRoute, ModelAccess, RouteRequest
from leyden.server.gateway.dialects.encoding import decode_body, given_of, sampling_of
from leyden.server.gateway.dialects.openai import openai_error
from leyden.server.gateway.dialects.responses.ids import call_of_response
from leyden.server.gateway.dialects.responses.items import read_items
from leyden.server.gateway.dialects.responses.request import (
    PromptParameters,
    ResponseParameters,
    check_supported,
    read_format,
)
from leyden.server.gateway.dialects.responses.stored import (
    StoredResponse,
    find_response,
    recorded_request,
    resolve_references,
    without_repeated,
)
from leyden.server.gateway.dialects.responses.tools import ToolTable
from leyden.server.gateway.dialects.responses.writer import ResponseWriter
from leyden.server.gateway.dialects.types import GenerationRequest, Message, ToolChoice
from leyden.server.gateway.errors import ErrorKind, GatewayError, invalid

_LIMIT = re.compile(r"[0-9]{1,9}").fullmatch


async def _read(call: RouteRequest, access: ModelAccess) -> DialectRequest:
    request, document = decode_body(call.body, ResponseParameters)
    if not request.model:
        raise invalid("name a model", "model")
    tools, choice = _read_tools(request)
    generation = GenerationRequest(
        model=request.model,
        messages=await _read_messages(request, tools, access),
        tools=tools.functions,
        tool_choice=choice,
        sampling=sampling_of(request, request.max_output_tokens),
        stream=bool(request.stream),
        top_logprobs=request.logprobs,
        format=read_format(request.text),
        reasoning=request.reasons,
        truncates=request.truncation == "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        ignored=given_of(document, ("max_tool_calls",)) + given_of(request.text or {}, ("verbosity",)),
        request=recorded_request(document, tools.given),
    )
    return DialectRequest(generation, lambda started: ResponseWriter(started.id, request, tools.given))


def _read_tools(request: PromptParameters) -> tuple[ToolTable, ToolChoice]:
    check_supported(request)
    tools = ToolTable.read(request.tools or ())
    return tools, tools.choice(request.tool_choice)


async def _read_messages(request: PromptParameters, tools: ToolTable, access: ModelAccess) -> tuple[Message, ...]:
    """Return the messages of a request: its instructions, the stored conversation that it continues, its input."""
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input or ()
    new: Sequence[Message] = read_items(await resolve_references(given, access), tools)
    messages: list[Message] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if request.previous_response_id:
        previous = await find_response(access, request.previous_response_id)
        if previous is None or not previous.complete:
            message = f"no response {request.previous_response_id!r} is stored: send the whole conversation"
            raise GatewayError(ErrorKind.NO_RESPONSE, message, "previous_response_id")
        messages += previous.conversation
        new = without_repeated(previous.conversation, new)
    messages += new
    if not messages:
        raise invalid("there is nothing to answer: send input", "input")
    return tuple(messages)


async def _stored(access: ModelAccess, request: RouteRequest) -> StoredResponse:
    id = request.path["response_id"]
    found = await find_response(access, id)
    if found is None:
        raise GatewayError(ErrorKind.NOT_FOUND, f"no response {id!r} is stored for this attempt", "response_id")
    return found


async def _get_response(access: ModelAccess, request: RouteRequest) -> bytes:
    """Return a stored response."""
    if request.query.get("stream") == "true":
        raise invalid("a stored response is not streamed again: leave it out", "stream")
    included = [request.query.get(name, "") for name in ("include", "include[]")]  # SDKs differ in how they write lists
    return msgspec.json.encode((await _stored(access, request)).document(",".join(included).split(",")))


async def _delete_response(access: ModelAccess, request: RouteRequest) -> bytes:
    """Delete a stored response; its call stays in the record."""
    await _stored(access, request)
    id = request.path["response_id"]
    await access.delete_answer(call_of_response(id) or "")
    return msgspec.json.encode({"id": id, "object": "response", "deleted": True})


async def _list_input_items(access: ModelAccess, request: RouteRequest) -> bytes:
    """List the input items of a stored response."""
    items = (await _stored(access, request)).input_items()
    if request.query.get("order") != "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    after = request.query.get("after")
    start = ids.index(after) + 1 if after in ids else 0
    limit = request.query.get("limit") or ""
    page = items[start : start + (int(limit) if _LIMIT(limit) else 20)]
    return msgspec.json.encode(_list(page, has_more=start + len(page) < len(items)))


def _list(items: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"] if items else "", "last_id": items[-1]["id"] if items else ""}
    return {"object": "list", "data": items, **ends, "has_more": has_more}


async def _count_input_tokens(access: ModelAccess, request: RouteRequest) -> bytes:
    """Count the tokens of a prompt."""
    counted, _ = decode_body(request.body, PromptParameters)
    tools, choice = _read_tools(counted)
    messages = await _read_messages(counted, tools, access)
    generation = GenerationRequest(counted.model, messages, tools.functions, choice, reasoning=counted.reasons)
    return msgspec.json.encode(
        {"object": "response.input_tokens", "input_tokens": await access.count_tokens(generation)}
    )


_ROUTES = (
    DialectRoute("POST", "/responses/input_tokens", _count_input_tokens),
    DialectRoute("GET", "/responses/{response_id}", _get_response),
    DialectRoute("DELETE", "/responses/{response_id}", _delete_response),
    DialectRoute("GET", "/responses/{response_id}/input_items", _list_input_items),
)
RESPONSES = Dialect("/responses", _read, openai_error, extra_routes=_ROUTES)
