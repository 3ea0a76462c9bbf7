"""Reads the tools of the Responses API. A model is only shown functions.

A custom tool, whose input is free text, is shown as a function with one argument, `input`. A tool in a namespace is
shown as `namespace__name`. `ToolTable` remembers how each was given, so that calls are written as the client expects.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct

from leyden.server.gateway.dialects.custom_tools import custom_function
from leyden.server.gateway.dialects.types import ToolChoice
from leyden.server.gateway.errors import invalid

_NO_PARAMETERS = {"type": "object", "properties": {}}
_HOSTED = "the server runs no tools: remove it, or offer a function or custom tool that the agent runs"


class GivenTool(Struct, frozen=True, omit_defaults=True):
    """A tool that the client knows by another name or type than the model."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ToolTable(Struct, frozen=True, dict=True):
    """The tools of a request: the functions that the model is shown, and how the client gave them."""

    functions: tuple[dict[str, Any], ...] = ()
    given: dict[str, GivenTool] = {}
    """By the model's name; plain functions are left out."""

    @classmethod
    def read(cls, tools: Sequence[dict[str, Any]], field: str = "tools") -> "ToolTable":
        """Read the tools of a request."""
        functions: list[dict[str, Any]] = []
        given: dict[str, GivenTool] = {}
        for tool, namespace, tool_field in _flatten(tools, field):
            name = tool.get("name")
            if not isinstance(name, str) or not name:
                raise invalid("a tool has a name", f"{tool_field}.name")
            custom = tool.get("type") == "custom"
            shown = f"{namespace}__{name}" if namespace else name
            if custom or namespace:
                given[shown] = GivenTool(name, namespace, custom)
            functions.append(_function(shown, tool, custom, tool_field))
        return cls(tuple(functions), given)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(function["function"]["name"] for function in self.functions)

    @cached_property
    def _given_names(self) -> dict[str, list[str]]:
        """The model's names by the client's."""
        names: dict[str, list[str]] = {}
        for shown, tool in self.given.items():
            names.setdefault(tool.name, []).append(shown)
        return names

    def written(self) -> list[dict[str, Any]]:
        """Return the tools as the client gave them; a custom tool without its format, which its description has."""
        tools: list[dict[str, Any]] = []
        namespaces: dict[str, list[dict[str, Any]]] = {}
        for function in self.functions:
            about = function["function"]
            given = self.given.get(about["name"], GivenTool(about["name"]))
            tool = {"type": "function", "strict": False, **about, "name": given.name}
            if given.custom:
                tool = {"type": "custom", "name": given.name, "description": about.get("description")}
            if given.namespace is None:
                tools.append(tool)
                continue
            if given.namespace not in namespaces:
                nested = namespaces[given.namespace] = []
                tools.append({"type": "namespace", "name": given.namespace, "description": "", "tools": nested})
            namespaces[given.namespace].append(tool)
        return tools

    def model_name(self, name: str, namespace: object = None) -> str:
        """Return the name by which the model knows a tool. A client may leave out the namespace of a call."""
        if isinstance(namespace, str) and namespace:
            return f"{namespace}__{name}"
        if name not in self:
            shown = self._given_names.get(name, [])
            if len(shown) == 1:
                return shown[0]
        return name

    def choice(self, choice: str | dict[str, Any] | None) -> ToolChoice:
        """Read `tool_choice`."""
        match choice:
            case None | "auto":
                return ToolChoice()
            case "none":
                return ToolChoice("none")
            case "required":
                return self._required()
            case {"type": "function" | "custom", "name": str(name), **other}:
                return self._required(self.model_name(name, other.get("namespace")))
            case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
                names = self._allowed(allowed)
                return self._required(allowed=names) if mode == "required" else ToolChoice(allowed=names)
        message = "write auto, none, required, the name of a function or custom tool, or allowed_tools"
        raise invalid(message, "tool_choice")

    def _required(self, name: str | None = None, allowed: frozenset[str] | None = None) -> ToolChoice:
        if name is not None and name not in self:
            raise invalid(f"no tool is called {name!r}", "tool_choice")
        if not (self.functions if allowed is None else allowed):
            raise invalid("there are no tools to choose from", "tool_choice")
        return ToolChoice("required", name, allowed)

    def _allowed(self, allowed: Sequence[Any]) -> frozenset[str]:
        names = set()
        for tool in allowed:
            name = tool.get("name") if isinstance(tool, dict) else None
            shown = self.model_name(name, tool.get("namespace")) if isinstance(name, str) else None
            if shown is None or shown not in self:
                raise invalid(f"no tool is called {name!r}", "tool_choice.tools")
            names.add(shown)
        return frozenset(names)


def is_left_out(tool: dict[str, Any]) -> bool:
    """Return whether the model is not shown a tool that agents offer by default and that no server runs here."""
    return str(tool.get("type")).startswith(("web_search", "image_generation"))


def _flatten(tools: Sequence[dict[str, Any]], field: str) -> Iterator[tuple[dict[str, Any], str | None, str]]:
    """Yield each function and custom tool with its namespace and field."""
    for index, tool in enumerate(tools):
        tool_field = f"{field}[{index}]"
        match tool:
            case {"type": "function" | "custom"}:
                yield tool, None, tool_field
            case {"type": "namespace", "name": str(namespace), "tools": list(nested)}:
                for at, inner in enumerate(nested):
                    inner_field = f"{tool_field}.tools[{at}]"
                    if isinstance(inner, dict) and inner.get("type") in ("function", "custom"):
                        yield inner, namespace, inner_field
                    elif not isinstance(inner, dict) or not is_left_out(inner):
                        raise invalid("a namespace has function and custom tools", inner_field)
            case _ if is_left_out(tool):
                pass
            case {"type": "tool_search"}:
                pass  # deferred tools are all shown at once, so there is nothing to search for
            case {"type": str(kind)}:
                raise invalid(f"{kind!r}: {_HOSTED}", f"{tool_field}.type")
            case _:
                raise invalid("a tool has a type and a name", tool_field)


def _function(name: str, tool: dict[str, Any], custom: bool, field: str) -> dict[str, Any]:
    """Write a tool as a function in the format that all dialects share."""
    if custom:
        return custom_function(name, tool.get("description"), tool.get("format"))
    description, parameters = tool.get("description") or "", tool.get("parameters") or _NO_PARAMETERS
    if not isinstance(parameters, dict) or not isinstance(description, str):
        raise invalid("the parameters of a tool are a JSON schema, its description is text", field)
    about = {"description": description} if description else {}
    strict = {"strict": True} if tool.get("strict") else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters, **strict}}
