"""Reads the tools of a chat request: functions, custom tools, and `functions`, their older form."""

from collections.abc import Sequence
from typing import Any

from leyden.server.gateway.dialects.custom_tools import custom_function
from leyden.server.gateway.dialects.types import ToolChoice
from leyden.server.gateway.errors import invalid


def read_tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """Convert a tool to the format that all dialects share."""
    match tool:
        case {"type": "function", "function": {"name": str()} as function}:
            # An absent field means the same, and the other dialects leave it out.
            given = {
                name: value
                for name, value in function.items()
                if value is not None and (name, value) != ("strict", False)
            }
            return {"type": "function", "function": given}
        case {"type": "custom", "custom": {"name": str(name)} as custom}:
            return custom_function(name, custom.get("description"), custom.get("format"))
    raise invalid("only tools of type function or custom, with a name, are supported", field)


def custom_names(tools: Sequence[dict[str, Any]]) -> frozenset[str]:
    """Return the names of the custom tools among those of a request."""
    return frozenset(tool["custom"]["name"] for tool in tools if tool.get("type") == "custom")


def read_tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[dict[str, Any]], field: str) -> ToolChoice:
    """Read `tool_choice`, or `function_call`, its older form."""
    names = {tool["function"]["name"] for tool in tools}
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            made = ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            made = ToolChoice("required", name)
        case {"name": str(name)} if field == "function_call":
            made = ToolChoice("required", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            made = ToolChoice(mode, allowed=frozenset(map(_name_of, allowed)))
        case _:
            raise invalid("write auto, none, required, a tool's name or allowed_tools", field)
    if not tools or made.allowed == frozenset():
        raise invalid("there are no tools to choose from", field)
    for name in {made.name} if made.name is not None else made.allowed or ():
        if name not in names:
            raise invalid(f"no tool is called {name!r}", field)
    return made


def _name_of(tool: Any) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}}:
            return name
    raise invalid("an allowed tool has a function or custom with a name", "tool_choice")
