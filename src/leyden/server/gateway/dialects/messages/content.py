"""Reads messages and their blocks into the format that all dialects share.

As in Anthropic's service, text blocks are joined, tool results come before the text sent with them, and consecutive
assistant messages are one answer.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from leyden.server.gateway.dialects.answer_parts import AnswerParts
from leyden.server.gateway.dialects.left_out import LEFT_OUT, stand_in
from leyden.server.gateway.dialects.tool_input import INVALID_JSON
from leyden.server.gateway.dialects.types import LOADED_TOOLS, PREFIX, Message
from leyden.server.gateway.errors import GatewayError, invalid

_SUPPORTED_BLOCKS = ("text", "thinking", "tool_use", "tool_result", "tool_reference")
_LOADED = "These tools can be called now:"
_MAX_SHOWN = 16 << 20
"""Characters of all tools that references show: a short reference can name a tool of megabytes, again and again."""


class MessageReader:
    """Collects messages in the format that all dialects share."""

    def __init__(self, tools: dict[str, dict[str, Any]]) -> None:
        self._messages: list[Message] = []
        self._answers: list[AnswerParts] = []
        self._tools = tools
        """All tools by name, deferred ones included."""
        self._shown = 0

    def finish(self) -> tuple[Message, ...]:
        """Return the messages."""
        for answer in self._answers:
            answer.join()
        last = self._messages[-1]
        if last["role"] == "assistant" and "tool_calls" not in last:
            last[PREFIX] = True
        return tuple(self._messages)

    def add_system(self, content: Any, field: str) -> None:
        """Add a system message."""
        self._messages.append({"role": "system", "content": _text_of(content, field)})

    def add(self, message: dict[str, Any], field: str) -> None:
        """Add a message."""
        content, content_field = message.get("content"), f"{field}.content"
        match message.get("role"):
            case "user":
                self._messages.extend(self._user_messages(content, content_field))
            case "assistant":
                if not self._messages or self._messages[-1]["role"] != "assistant":
                    self._answers.append(AnswerParts())
                    self._messages.append(self._answers[-1].message)
                _extend_answer(self._answers[-1], content, content_field)
            case "system":
                self.add_system(content, content_field)
            case role:
                raise invalid(f"{role!r} is not a role: write user or assistant", f"{field}.role")

    def _user_messages(self, content: Any, field: str) -> Iterator[Message]:
        """Split a user's content into tool messages and one user message."""
        texts: list[str] = []
        results = False
        for block, block_field in _blocks(content, field):
            match block:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case {"type": "tool_result", "tool_use_id": str(id)}:
                    results = True
                    failed = {"is_error": True} if block.get("is_error") else {}
                    result = self._tool_result(block.get("content") or "", f"{block_field}.content")
                    yield {"role": "tool", "tool_call_id": id, **result, **failed}
                case _:
                    raise _bad_block(block, block_field)
        if texts or not results:
            yield {"role": "user", "content": "".join(texts)}

    def _tool_result(self, content: Any, field: str) -> Message:
        """Read a tool's result. A reference to a deferred tool shows its definition from here on."""
        texts: list[str] = []
        loaded: list[dict[str, Any]] = []
        left_out: list[str] = []
        for block, block_field in _blocks(content, field):
            match block:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case {"type": "tool_reference", "tool_name": str(name)}:
                    if name not in self._tools:
                        raise invalid(f"no tool is called {name!r}", f"{block_field}.tool_name")
                    loaded.append(self._tools[name])
                case _:
                    texts.append(stand_in(block, f"{block_field}.type", left_out))
        noted = {LEFT_OUT: left_out} if left_out else {}
        if not loaded:
            return {"content": "".join(texts), **noted}
        shown = []
        for tool in loaded:
            shown.append(json.dumps(tool, ensure_ascii=False))
            self._shown += len(shown[-1])
            if self._shown > _MAX_SHOWN:
                message = f"the tools of all references have more than {_MAX_SHOWN} characters: refer to fewer"
                raise invalid(message, field)
        return {"content": "\n".join([*texts, _LOADED, *shown]), LOADED_TOOLS: loaded, **noted}


def _extend_answer(answer: AnswerParts, content: Any, field: str) -> None:
    """Add the blocks of an assistant's message to an answer."""
    for block, block_field in _blocks(content, field):
        match block:
            case {"type": "text", "text": str(text)}:
                answer.add_text("content", text)
            case {"type": "thinking", "thinking": str(text)}:
                answer.add_text("reasoning_content", text)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
                malformed = given.get(INVALID_JSON)
                whole = malformed if isinstance(malformed, str) else msgspec.json.encode(given).decode()
                answer.add_call(id, name, whole)
            case _:
                raise _bad_block(block, block_field)


def _text_of(content: Any, field: str) -> str:
    """Return the text of a content that has only text blocks."""
    texts = []
    for block, block_field in _blocks(content, field):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _bad_block(block, block_field)
    return "".join(texts)


def _blocks(content: Any, field: str) -> Iterator[tuple[Any, str]]:
    """Yield the blocks of a content with their field names; plain text is one block."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, field
    elif isinstance(content, list):
        yield from ((block, f"{field}.{index}") for index, block in enumerate(content))
    else:
        raise invalid("this must be text or a list of blocks", field)


def _bad_block(block: Any, field: str) -> GatewayError:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in _SUPPORTED_BLOCKS:
        return invalid(f"a block of type {kind!r} does not belong here, or lacks a field", field)
    message = f"blocks of type {kind!r} are not supported: this model takes text"
    return invalid(message, f"{field}.type")
