"""Reads the tools of a request and which of them is to be called."""

from collections.abc import Sequence
from typing import Any

from leyden.server.gateway.dialects.types import ToolChoice
from leyden.server.gateway.errors import ErrorKind, GatewayError


def read_tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """Convert a tool to the format that all dialects share."""
    if tool.get("type") not in (None, "custom"):
        how = "remove it, or have the agent run a tool that it describes by name, description and input_schema"
        message = f"tools of type {tool['type']!r} are not run or described here: {how}"
        raise GatewayError(ErrorKind.INVALID, message, f"{field}.type")
    match tool:
        case {"name": str(name), "input_schema": dict(schema)}:
            about = {"description": tool["description"]} if tool.get("description") else {}
            strict = {"strict": True} if tool.get("strict") else {}
            return {"type": "function", "function": {"name": name, **about, "parameters": schema, **strict}}
    raise GatewayError(ErrorKind.INVALID, "a tool has a name and an input_schema", field)


def read_tool_choice(choice: dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """Read `tool_choice`."""
    match choice:
        case None | {"type": "auto"}:
            return ToolChoice()
        case {"type": "none"}:
            return ToolChoice("none")
        case {"type": "any"}:
            name = None
        case {"type": "tool", "name": str(name)}:
            if name not in (tool["function"]["name"] for tool in tools):
                raise GatewayError(ErrorKind.INVALID, f"no tool is called {name!r}", "tool_choice.name")
        case _:
            raise GatewayError(ErrorKind.INVALID, "write auto, any, none, or tool with its name", "tool_choice.type")
    if not tools:
        raise GatewayError(ErrorKind.INVALID, "there are no tools to choose from", "tool_choice")
    return ToolChoice("required", name)
