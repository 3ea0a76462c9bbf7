"""Custom tools, whose input is free text. A model is shown a function with one argument, `input`."""

import re
from typing import Any

import msgspec

from leyden.server.gateway.dialects.types import ToolCall

_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_INPUT_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(r'(?:[^"\\]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|(?:\\u[0-9a-fA-F]{4}){2}|\\[^u])*')
"""Characters of a JSON string that are complete; an escaped surrogate is complete with its other half."""


def custom_function(name: str, description: Any, format: Any) -> dict[str, Any]:
    """Return a custom tool as a function in the format that all dialects share. Its description has the grammar."""
    about = description if isinstance(description, str) else ""
    grammar = format.get("grammar", format) if isinstance(format, dict) and format.get("type") == "grammar" else None
    match grammar:
        case {"syntax": str(syntax), "definition": str(definition)}:
            about = f"{about}\nThe input follows this {syntax} grammar:\n{definition}".strip()
    described = {"description": about} if about else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": _PARAMETERS}}


def custom_arguments(text: str) -> str:
    """Return the arguments of a call with this input."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(call: ToolCall) -> str:
    """Return the input of a custom tool's call; arguments of another form are the input as they are."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        return call.arguments
    match arguments:
        case {"input": str(text)}:
            return text
    return call.arguments


class CustomInput:
    """The input of a custom tool's call, decoded from arguments that are still being written.

    Text that was sent is never changed: the complete call only adds to it.
    """

    def __init__(self) -> None:
        self.text = ""
        self._begun = False
        self._rest = ""

    def feed(self, arguments: str) -> str:
        """Add to the arguments; return the new part of the input. Arguments of another form have none yet."""
        self._rest += arguments
        if not self._begun:
            head = _INPUT_HEAD.match(self._rest)
            if head is None:
                return ""
            self._begun, self._rest = True, self._rest[head.end() :]
        characters = _CHARACTERS.match(self._rest)
        assert characters is not None  # it matches the empty text too
        try:
            new: str = msgspec.json.decode(f'"{characters[0]}"'.encode(), type=str)
        except (msgspec.DecodeError, UnicodeError):
            return ""  # it is no JSON, so the complete call is malformed
        self._rest = self._rest[characters.end() :]
        self.text += new
        return new

    def finish(self, call: ToolCall) -> str:
        """Return what a complete call adds."""
        whole = custom_input(call)
        new = whole.removeprefix(self.text) if whole.startswith(self.text) else ""
        self.text += new
        return new
