"""A call to a model that is served elsewhere: passed on, and recorded without tokens."""

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from leyden.records import Call, CallStatus
from leyden.server.gateway.ask import Ask, Calling, Done, Event, FinishReason, Reasoning, Text, ToolCall
from leyden.server.gateway.caller import Caller
from leyden.server.gateway.conversation import Conversation, History
from leyden.server.gateway.errors import GatewayError
from leyden.server.gateway.recorder import Recorder
from leyden.server.gateway.upstream import Upstream

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


async def relay(
    recorder: Recorder,
    conversation: Conversation,
    caller: Caller,
    upstream: Upstream,
    ask: Ask,
    first: str,
) -> AsyncGenerator[Event, None]:
    """Pass an ask on; the answer is in the record before any of it is passed back."""
    began = time.time()
    history = History.of(ask.messages, ask.tools, UPSTREAM)
    place = conversation.place(history)
    parent = place.turn.call if place.turn is not None else None
    shared = place.shared if parent is not None else 0

    def recorded(choice: int, message: Any, status: CallStatus, finish: str) -> Call:
        own: dict[str, Any] = {"parent": parent, "kept_messages": shared, "messages": ask.messages[shared:]}
        if choice:
            own = {"parent": first, "kept_messages": len(ask.messages)}
        return Call(
            id=f"{first}-{choice}" if choice else first,
            choice=choice,
            policy=UPSTREAM,
            role=caller.role,
            span=caller.span,
            made=place.made,
            made_why=place.why,
            status=status,
            finish=finish,
            sampling=ask.sampling,
            response=message,
            tools=ask.tools if parent is None and not choice else None,
            request=ask.request,
            started=began,
            ended=time.time(),
            **own,
        )

    try:
        answer = await upstream.complete(ask)
    except GatewayError:
        failed = recorded(0, None, CallStatus.FAILED, "failed")
        await recorder.record(caller.live, conversation, [failed], history)
        raise
    choices = answer["choices"]
    calls = [
        recorded(index, choice["message"], CallStatus.OK, str(choice.get("finish_reason") or "stop"))
        for index, choice in enumerate(choices)
    ]
    await recorder.record(caller.live, conversation, calls, history)
    usage = answer.get("usage") or {}
    for index, (choice, call) in enumerate(zip(choices, calls, strict=True)):
        for event in _events(index, choice["message"]):
            yield event
        yield Done(
            choice=index,
            id=call.id,
            finish=_FINISHES.get(call.finish, "stop"),
            stop=None,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=(usage.get("completion_tokens") or 0) if index == 0 else 0,
        )


def _events(choice: int, message: dict[str, Any]) -> list[Event]:
    events: list[Event] = []
    if reasoning := message.get("reasoning_content"):
        events.append(Reasoning(choice, reasoning))
    if content := message.get("content"):
        events.append(Text(choice, content))
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        events.append(Calling(choice, index, ToolCall(call["id"], function["name"], text)))
    return events


UPSTREAM = "upstream"
"""The policy under which such calls are recorded, and the route that leads here."""
