"""Collects an assistant's message that a client sends back in parts: blocks, items, or messages in a row."""

from typing import Any, Literal

from leyden.server.gateway.dialects.types import Message

TextField = Literal["content", "reasoning_content"]


class AnswerParts:
    """The parts of one message. Texts are joined once, because adding to a long text copies all of it."""

    def __init__(self) -> None:
        self.message: Message = {"role": "assistant", "content": ""}
        """Complete after `join`."""
        self._texts: dict[str, list[str]] = {}

    def add_text(self, field: TextField, text: str) -> None:
        """Append to the text or to the reasoning."""
        parts = self._texts.setdefault(field, [])
        if text:
            parts.append(text)

    def add_call(self, id: str, name: str, arguments: str) -> None:
        """Append a tool call."""
        call: dict[str, Any] = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.message.setdefault("tool_calls", []).append(call)

    @property
    def has_text(self) -> bool:
        """Whether it has text other than reasoning."""
        return bool(self._texts.get("content"))

    def join(self) -> None:
        """Write the texts into the message."""
        for field, parts in self._texts.items():
            self.message[field] = "".join(parts)
