"""Reads input items into messages. The items of one answer (reasoning, text, calls) become one assistant message."""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

from leyden.decoding import decode_text
from leyden.server.gateway.dialects.answer_parts import AnswerParts
from leyden.server.gateway.dialects.custom_tools import custom_arguments
from leyden.server.gateway.dialects.left_out import text_of, tool_result
from leyden.server.gateway.dialects.responses.ids import call_of_item
from leyden.server.gateway.dialects.responses.tools import ToolTable
from leyden.server.gateway.dialects.types import Message
from leyden.server.gateway.errors import GatewayError, invalid

_SEAL = "leyden."
_MAX_UNSEALED = 4 << 20
"""Bytes of sealed reasoning in one request: a few compressed kilobytes can expand to gigabytes."""


def read_items(items: Sequence[Any], tools: ToolTable) -> list[Message]:
    """Convert input items to messages in the format that all dialects share."""
    reader = _ItemReader(tools)
    for index, item in enumerate(items):
        reader.add(item, f"input[{index}]")
    return reader.finish()


def seal_reasoning(text: str) -> str:
    """Return reasoning as `encrypted_content`: opaque to clients, and read without any state when it comes back."""
    return _SEAL + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def _unseal_reasoning(sealed: Any, limit: int) -> bytes:
    """Return the reasoning in an `encrypted_content`, at most one byte over the limit; empty if sealed elsewhere."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return b""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.urlsafe_b64decode(sealed.removeprefix(_SEAL)), limit + 1)
    except (ValueError, zlib.error):
        return b""
    return data if inflater.eof or len(data) > limit else b""


class _ItemReader:
    """Collects messages, and knows which answer the latest assistant message is from."""

    def __init__(self, tools: ToolTable) -> None:
        self._messages: list[Message] = []
        self._tools = tools
        self._answers: list[AnswerParts] = []
        self._source: str | None = None
        """The recorded call of the latest answer, if its items name one."""
        self._unsealed = 0

    def finish(self) -> list[Message]:
        """Return the messages."""
        for answer in self._answers:
            answer.join()
        return self._messages

    def add(self, item: Any, field: str) -> None:
        """Add an item: a new message, or a part of the latest answer."""
        match item:
            case {"role": "assistant"}:
                text = text_of(item.get("content"), f"{field}.content")
                self._answer_for(item, holds="content").add_text("content", text)
            case {"role": "user" | "system" | "developer" as role}:
                shared = "user" if role == "user" else "system"
                self._messages.append({"role": shared, "content": text_of(item.get("content"), f"{field}.content")})
            case {"type": "reasoning"}:
                answer = self._answer_for(item, holds="reasoning_content")
                answer.add_text("reasoning_content", self._reasoning(item, field))
            case {"type": "function_call", "call_id": str(id), "name": str(name)}:
                self._add_call(item, id, name, item.get("arguments") or "{}", field)
            case {"type": "custom_tool_call", "call_id": str(id), "name": str(name), "input": str(text)}:
                self._add_call(item, id, name, custom_arguments(text), field)
            case {"type": "function_call_output" | "custom_tool_call_output", "call_id": str(id)}:
                output = tool_result(item.get("output"), f"{field}.output")
                self._messages.append({"role": "tool", "tool_call_id": id, **output})
            case _:
                raise _bad_item(item, field)

    def _add_call(self, item: dict[str, Any], id: str, name: str, arguments: Any, field: str) -> None:
        if not isinstance(arguments, str):
            raise invalid("the arguments of a call are JSON text", f"{field}.arguments")
        name = self._tools.model_name(name, item.get("namespace"))
        self._answer_for(item, holds="tool_calls").add_call(id, name, arguments)

    def _reasoning(self, item: dict[str, Any], field: str) -> str:
        """Return the text of a reasoning item: its content, else its sealed content, else its summary."""
        if content := _joined(item.get("content"), f"{field}.content"):
            return content
        sealed = _unseal_reasoning(item.get("encrypted_content"), _MAX_UNSEALED - self._unsealed)
        self._unsealed += len(sealed)
        if self._unsealed > _MAX_UNSEALED:
            message = f"the reasoning of a request has more than {_MAX_UNSEALED} bytes: leave out older items"
            raise invalid(message, f"{field}.encrypted_content")
        return decode_text(sealed) or _joined(item.get("summary"), f"{field}.summary")

    def _answer_for(self, item: dict[str, Any], holds: str) -> AnswerParts:
        """Return the assistant message that an item belongs to: the latest one, or a new one.

        Items with ids that were given out here name their answer, so a client may put tool outputs between them.
        Without ids, calls follow directly, and a second text or reasoning begins a new message.
        """
        source = call_of_item(item.get("id"))
        if self._answers:
            latest = self._answers[-1]
            if source is not None and source == self._source:
                return latest
            adjacent = latest.message is self._messages[-1]
            distinct = source is not None and self._source is not None
            if adjacent and not distinct and (holds == "tool_calls" or not _begun(latest, holds)):
                self._source = self._source or source
                return latest
        self._source = source
        self._answers.append(AnswerParts())
        self._messages.append(self._answers[-1].message)
        return self._answers[-1]


def _begun(answer: AnswerParts, holds: str) -> bool:
    """Whether an item of this kind cannot be part of an answer any more."""
    return answer.has_text or (holds == "reasoning_content" and "tool_calls" in answer.message)


def _joined(parts: Any, field: str) -> str:
    if not isinstance(parts, list | None):
        raise invalid("this is a list of parts", field)
    return "".join(str(part.get("text") or "") for part in parts or () if isinstance(part, dict))


def _bad_item(item: Any, field: str) -> GatewayError:
    kind = item.get("type") if isinstance(item, dict) else None
    known = "message, reasoning, function_call, function_call_output, custom_tool_call and custom_tool_call_output"
    if kind in known.replace(" and", ",").split(", "):
        return invalid(f"an item of type {kind!r} lacks a field", field)
    if kind is None:
        return invalid("an item is a message with a role, or has a type", field)
    return invalid(f"items of type {kind!r} are not supported: only {known} are", f"{field}.type")
