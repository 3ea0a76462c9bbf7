"""Reads contents and their parts into the format that all dialects share.

Contents of the model in a row are one answer, since clients keep each chunk of a stream as a content.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from leyden.server.gateway.dialects.answer_parts import AnswerParts
from leyden.server.gateway.dialects.chat.messages import answered_call
from leyden.server.gateway.dialects.left_out import LEFT_OUT, stand_in
from leyden.server.gateway.dialects.tool_input import INVALID_JSON
from leyden.server.gateway.dialects.types import Message
from leyden.server.gateway.errors import invalid

_ABOUT_OTHERS = frozenset({"thought", "thought_signature", "video_metadata", "media_resolution", "part_metadata"})
"""Fields of a part that are no content of their own."""


def read_contents(system: dict[str, Any] | None, contents: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """Read the system instruction and the conversation."""
    messages: list[Message] = []
    answers: list[AnswerParts] = []
    unanswered: dict[str, str] = {}  # by the id of a call, its tool
    if system is not None:
        text = "".join(_text(part, field) for part, field in _parts(system, "system_instruction"))
        messages.append({"role": "system", "content": text})
    for index, content in enumerate(contents):
        field = f"contents[{index}]"
        match content.get("role"):
            case "model":
                if not messages or messages[-1]["role"] != "assistant":
                    answers.append(AnswerParts())
                    messages.append(answers[-1].message)
                    unanswered = {}
                for part, part_field in _parts(content, field):
                    _extend_answer(answers[-1], part, part_field, unanswered)
            case None | "" | "user" | "function":
                messages.extend(_user_messages(content, field, unanswered))
            case role:
                raise invalid(f"{role!r} is not a role: write user or model", f"{field}.role")
    for answer in answers:
        answer.join()
    return tuple(messages)


def _extend_answer(answer: AnswerParts, part: dict[str, Any], field: str, unanswered: dict[str, str]) -> None:
    match part:
        case {"function_call": {"name": str(name), **rest}}:
            args = rest.get("args") or {}
            malformed = args.get(INVALID_JSON) if isinstance(args, dict) else None
            id = rest.get("id") or f"call_{len(unanswered)}"
            if not isinstance(args, dict) or not isinstance(id, str):
                raise invalid("the args of a function call are an object, and its id is text", field)
            answer.add_call(id, name, malformed if isinstance(malformed, str) else _written(args))
            unanswered[id] = name
        case {"text": str(text), "thought": True}:
            answer.add_text("reasoning_content", text)
        case _:
            answer.add_text("content", _text(part, field))


def _user_messages(content: dict[str, Any], field: str, unanswered: dict[str, str]) -> list[Message]:
    """Split a user's content into tool messages and one user message."""
    results: list[Message] = []
    texts: list[str] = []
    read: list[dict[str, Any]] = []
    for part, part_field in _parts(content, field):
        match part:
            case {"function_response": {"id": str()} as result} if result in read:
                pass  # gemini-cli writes each result twice when it resumes a session
            case {"function_response": {"name": str()} as result}:
                read.append(result)
                id = answered_call(result, unanswered, f"{part_field}.function_response")
                unanswered.pop(id, None)
                results.append({"role": "tool", "tool_call_id": id, **_result(result.get("response"))})
                for file, file_field in _parts(result, f"{part_field}.function_response"):
                    _leave_out(file, file_field, results[-1])
            case {"text": str(text)}:
                texts.append(text)
            case _ if results and _kind(part) is not None:  # agents put what a tool has read beside its result
                _leave_out(part, part_field, results[-1])
            case _:
                texts.append(_text(part, part_field))
    return results if results and not texts else [*results, {"role": "user", "content": "".join(texts)}]


def _result(response: Any) -> Message:
    """Read what a tool returned: by Google's documentation `output` or `error` of it, else all of it."""
    match response:
        case {"error": error} if len(response) == 1:
            return {"content": _written(error), "is_error": True}
        case {"output": output} | {"result": output} if len(response) == 1:  # SDKs write `result`
            return {"content": _written(output)}
    return {"content": _written(response)}


def _leave_out(part: dict[str, Any], field: str, message: Message) -> None:
    message["content"] += stand_in({"type": _kind(part)}, field, message.setdefault(LEFT_OUT, []))


def _text(part: dict[str, Any], field: str) -> str:
    """Return the text of a part; empty if it has no content."""
    if isinstance(part.get("text"), str):
        return str(part["text"])
    return "" if (kind := _kind(part)) is None else stand_in({"type": kind}, field, None)


def _kind(part: dict[str, Any]) -> str | None:
    return next((name for name, value in part.items() if name not in _ABOUT_OTHERS and value is not None), None)


def _parts(content: dict[str, Any], field: str) -> Iterator[tuple[dict[str, Any], str]]:
    parts = content.get("parts") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid("parts is a list of objects", f"{field}.parts")
    yield from ((part, f"{field}.parts[{index}]") for index, part in enumerate(parts))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
