"""Checks what the server writes against the typed models of the `openai` package."""

import json
from typing import Any, get_args

import aiohttp
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

_EVENTS = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}
_UNTYPED = {"store", "bytes", "status"}
"""Fields that the service sends and the package's models lack."""


def check_response(document: Any) -> Response:
    """Validate a response object; every field must be one that the models know."""
    response = Response.model_validate(document)
    _check_known(response)
    return response


def check_event(document: Any) -> Any:
    """Validate a stream event."""
    event = _EVENTS[document["type"]].model_validate(document)
    _check_known(event)
    return event


def _check_known(value: Any) -> None:
    if isinstance(value, pydantic.BaseModel):
        assert set(value.model_extra or ()) <= _UNTYPED, (type(value), value.model_extra)
        for name in type(value).model_fields:
            _check_known(getattr(value, name))
    elif isinstance(value, list):
        for part in value:
            _check_known(part)


async def stream_events(url: str, key: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Stream a response; return its events, each validated, after checking their names and numbers."""
    events = []
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/responses", json={**body, "stream": True}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        for block in (await reply.text()).strip().split("\n\n"):
            name, _, data = block.partition("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            check_event(event)
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events
