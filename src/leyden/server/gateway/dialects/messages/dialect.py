"""The dialect of Anthropic's Messages API, with its routes."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from leyden.server.gateway.dialects.base import (
    Dialect,
    DialectRequest,
    DialectRoute,
    ModelAccess,
    RouteRequest,
    model_route,
)
from leyden.server.gateway.dialects.encoding import decode_body
from leyden.server.gateway.dialects.messages.request import CountRequest, read_prompt, read_request, shows_thinking
from leyden.server.gateway.dialects.messages.writer import MessagesWriter, anthropic_error
from leyden.server.gateway.errors import invalid


async def _read(call: RouteRequest, access: ModelAccess) -> DialectRequest:
    request = read_request(call.body)
    shows = shows_thinking(request.request.get("thinking"))
    return DialectRequest(request, lambda started: MessagesWriter(request, shows, started))


async def _count_tokens(access: ModelAccess, request: RouteRequest) -> bytes:
    """Count the tokens of a prompt."""
    counted, _ = decode_body(request.body, CountRequest, dotted=True)
    return msgspec.json.encode({"input_tokens": await access.count_tokens(read_prompt(counted))})


class ModelListQuery(Struct, frozen=True):
    """The page of the model list that a client wants."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


async def _list_models(access: ModelAccess, request: RouteRequest) -> bytes:
    """List the models that the caller may use."""
    try:
        query = msgspec.convert(request.query, ModelListQuery, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from error
    return msgspec.json.encode(_page(await access.model_names(), query))


def _model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _page(names: Sequence[str], query: ModelListQuery) -> dict[str, Any]:
    """Cut a page out of the list of models."""
    start = names.index(query.after_id) + 1 if query.after_id in names else 0
    end = names.index(query.before_id) if query.before_id in names else len(names)
    if query.before_id in names:
        start = max(start, end - query.limit)
    page = names[start : min(end, start + query.limit)]
    more = start > 0 if query.before_id in names else start + len(page) < len(names)
    ends = {"first_id": page[0] if page else None, "last_id": page[-1] if page else None}
    return {"data": list(map(_model, page)), "has_more": more, **ends}


_ROUTES = (
    DialectRoute("POST", "/messages/count_tokens", _count_tokens),
    DialectRoute("GET", "/models", _list_models),
    model_route(_model),
)
MESSAGES = Dialect("/messages", _read, anthropic_error, "anthropic-version", _ROUTES)
