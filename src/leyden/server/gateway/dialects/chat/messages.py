"""Reads the messages of a chat request into the format that all dialects share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leyden.server.gateway.dialects.custom_tools import custom_arguments
from leyden.server.gateway.dialects.left_out import text_of, tool_result
from leyden.server.gateway.dialects.types import PREFIX, Message
from leyden.server.gateway.errors import invalid


def read_messages(messages: Sequence[dict[str, Any]], continues: bool) -> tuple[Message, ...]:
    """Convert messages; `continues` says that the last one is the beginning of the answer, if it is the assistant's."""
    read = list(_read(messages))
    last = read[-1]
    continues = continues or messages[-1].get("prefix") is True
    if continues and last["role"] == "assistant" and "tool_calls" not in last:
        last[PREFIX] = True
    return tuple(read)


def _read(messages: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """Convert messages; find the calls of tools' results that name none."""
    unanswered: dict[str, str] = {}  # by the id of a call, its tool
    for index, given in enumerate(messages):
        field = f"messages[{index}]"
        message = _message(given, field)
        if message["role"] == "assistant":
            unanswered = {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        elif message["role"] == "tool":
            message["tool_call_id"] = id = answered_call(given, unanswered, field)
            unanswered.pop(id, None)
        yield message


def answered_call(result: dict[str, Any], unanswered: Mapping[str, str], field: str) -> str:
    """Return the call that a tool's result is for: by `tool_call_id`, by `id`, by the tool's name, or the next one."""
    if isinstance(result.get("tool_call_id"), str):
        return str(result["tool_call_id"])
    if isinstance(result.get("id"), str) and result["id"] in unanswered:
        return str(result["id"])
    named = result.get("name") in unanswered.values()
    for id, tool in unanswered.items():
        if not named or tool == result["name"]:
            return id
    raise invalid("a tool's message names its call, or follows one that is not answered", f"{field}.tool_call_id")


def _message(message: dict[str, Any], field: str) -> Message:
    """Convert a message to the format that all dialects share."""
    role, content = message.get("role"), f"{field}.content"
    match role:
        case "system" | "developer" | "user":
            named = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
            kind = "system" if role == "developer" else role
            return {"role": kind, "content": text_of(message.get("content"), content), **named}
        case "assistant":
            return _answer(message, field)
        case "tool" | "function":
            return {"role": "tool", "tool_call_id": None, **tool_result(message.get("content"), content)}
    roles = "system, developer, user, assistant or tool"
    raise invalid(f"{role!r} is not a role: write {roles}", f"{field}.role")


def _answer(message: dict[str, Any], field: str) -> Message:
    made = message.get("tool_calls") or []
    if not isinstance(made, list):
        raise invalid("tool_calls is a list", f"{field}.tool_calls")
    if not made and message.get("function_call"):
        made = [{"function": message["function_call"]}]
    calls = [_call(call, index, f"{field}.tool_calls[{index}]") for index, call in enumerate(made)]
    given = message.get("refusal") if message.get("content") is None else message["content"]
    content = text_of(given, f"{field}.content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    answer: Message = {"role": "assistant", "content": content}
    if isinstance(reasoning, str):
        answer["reasoning_content"] = reasoning
    return {**answer, "tool_calls": calls} if calls else answer


def _call(call: Any, index: int, field: str) -> dict[str, Any]:
    match call:
        case {"type": "custom", "custom": {"name": name, "input": str(text)}}:
            arguments: Any = custom_arguments(text)
        case {"function": {"name": name, **rest}}:
            arguments = rest.get("arguments") or "{}"
        case _:
            raise invalid("a tool call has a function with a name", field)
    id = call.get("id") or f"call_{index}"
    if not (isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise invalid("id, name and arguments of a tool call are text", field)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
