"""An answer that a client sends back in many parts is one message, and costs one pass over its text."""

import time
from typing import Any

import msgspec
import pytest

from leyden.server.gateway.dialects.messages.request import read_request
from leyden.server.gateway.dialects.responses.items import read_items
from leyden.server.gateway.dialects.responses.tools import ToolTable
from leyden.server.gateway.errors import GatewayError

PART = "word " * 200
PARTS = 6000


def read_messages(messages: list[Any], **fields: Any) -> tuple[Any, ...]:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}, *messages], **fields}
    return read_request(msgspec.json.encode(body)).messages


@pytest.mark.parametrize("form", ["blocks", "messages", "thinking", "items", "reasoning items"])
def test_many_parts_are_joined_in_linear_time(form: str) -> None:
    started = time.thread_time()
    block = {"type": "text", "text": PART}
    match form:
        case "blocks":
            answer = read_messages([{"role": "assistant", "content": [block] * PARTS}])[-1]
        case "messages":
            answer = read_messages([{"role": "assistant", "content": [block]}] * PARTS)[-1]
        case "thinking":
            thinking = {"type": "thinking", "thinking": PART}
            answer = read_messages([{"role": "assistant", "content": [thinking] * PARTS}])[-1]
        case "items":
            item = {"role": "assistant", "id": "msg_call-0_0", "content": PART}
            (answer,) = read_items([item] * PARTS, ToolTable())
        case _:
            item = {"type": "reasoning", "id": "rs_call-0_0", "content": [{"type": "reasoning_text", "text": PART}]}
            (answer,) = read_items([item] * PARTS, ToolTable())
    reasoned = form in ("thinking", "reasoning items")
    assert answer["reasoning_content" if reasoned else "content"] == PART * PARTS
    assert time.thread_time() - started < 3  # adding part to part copies 18 GB


def test_references_to_a_large_tool_are_bounded() -> None:
    tool = {"name": "large", "input_schema": {"type": "object", "description": "d" * (1 << 20)}, "defer_loading": True}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "find", "input": {}}]}

    def show(references: int) -> str:
        content = [{"type": "tool_reference", "tool_name": "large"}] * references
        result = {"type": "tool_result", "tool_use_id": "t", "content": content}
        return str(read_messages([use, {"role": "user", "content": [result]}], tools=[tool])[-1]["content"])

    assert len(show(2)) > 2 << 20
    with pytest.raises(GatewayError, match="refer to fewer"):
        show(20)
