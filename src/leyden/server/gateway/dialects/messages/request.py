"""Reads the parameters of a request to /v1/messages, its tools among them."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from leyden.server.gateway.dialects.encoding import decode_body, given_of, sampling_of
from leyden.server.gateway.dialects.messages.client_tools import client_tool
from leyden.server.gateway.dialects.messages.content import MessageReader
from leyden.server.gateway.dialects.types import Format, GenerationRequest, ToolChoice
from leyden.server.gateway.errors import invalid

_UNSUPPORTED = {
    "thread": "conversations are not stored for the caller: send all messages",
    "compaction": "conversations are not summarised here: send the messages to keep",
    "mcp_servers": "tools of MCP servers are not supported",
}


_IGNORED = ("container", "context_management")
"""Parameters that change the answers of Anthropic's service and have no effect here."""


class CountRequest(Struct, frozen=True):
    """The fields that make up a prompt; other fields are recorded and ignored."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thread: Any = None
    compaction: Any = None
    mcp_servers: Any = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """A request for a message: the prompt, and how to answer it."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    stream: bool | None = None


def read_request(data: bytes) -> GenerationRequest:
    """Read the body of a request for a message."""
    request, document = decode_body(data, MessagesRequest, dotted=True)
    sampling = sampling_of(request, request.max_tokens, request.stop_sequences)
    others = {name: value for name, value in document.items() if name not in ("messages", "system", "tools")}
    generation = read_prompt(request)
    if generation.messages[-1].get("tool_calls"):
        why = "the last message must be the user's, or text that the answer begins with"
        raise invalid(why, f"messages.{len(request.messages) - 1}")
    ignored = given_of(document, _IGNORED)
    return replace(generation, sampling=sampling, stream=bool(request.stream), ignored=ignored, request=others)


def shows_thinking(thinking: Any) -> bool:
    """Return whether the parameter `thinking` asks for blocks with the model's thinking."""
    match thinking:
        case {"type": "disabled"} | {"display": "omitted"}:
            return False
    return bool(thinking)


def read_prompt(request: CountRequest) -> GenerationRequest:
    """Read the fields that make up a prompt."""
    for param, why in _UNSUPPORTED.items():
        if getattr(request, param):
            raise invalid(why, param)
    tools = [_read_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or ())]
    reader = MessageReader({tool["function"]["name"]: tool for tool in tools})
    if request.system:
        reader.add_system(request.system, "system")
    for index, message in enumerate(request.messages):
        reader.add(message, f"messages.{index}")
    deferred = [bool(tool.get("defer_loading")) for tool in request.tools or ()]
    return GenerationRequest(
        model=request.model,
        messages=reader.finish(),
        tools=tuple(tool for tool, later in zip(tools, deferred, strict=True) if not later),
        tool_choice=_read_tool_choice(request.tool_choice, tools),
        parallel_tool_calls=not (request.tool_choice or {}).get("disable_parallel_tool_use"),
        format=_format(request),
        reasoning=None if request.thinking is None else request.thinking.get("type") != "disabled",
    )


def _format(request: CountRequest) -> Format | None:
    """Read the format of the answer; older clients send it as `output_format`."""
    match (request.output_config or {}).get("format") or request.output_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "schema": dict() as schema}:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    raise invalid("the format must be text, or json_schema with a schema", "output_config.format")


def _read_tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """Convert a tool to the format that all dialects share."""
    kind = tool.get("type")
    if isinstance(kind, str) and isinstance(tool.get("name"), str) and (known := client_tool(kind)) is not None:
        description, schema = known
        return {
            "type": "function",
            "function": {"name": tool["name"], "description": description, "parameters": schema},
        }
    if kind not in (None, "custom"):
        how = "remove it, or have the agent run a tool that it describes by name, description and input_schema"
        raise invalid(f"tools of type {kind!r} are not run or described here: {how}", f"{field}.type")
    match tool:
        case {"name": str(name), "input_schema": dict(schema)}:
            about = {"description": tool["description"]} if tool.get("description") else {}
            strict = {"strict": True} if tool.get("strict") else {}
            return {"type": "function", "function": {"name": name, **about, "parameters": schema, **strict}}
    raise invalid("a tool has a name and an input_schema", field)


def _read_tool_choice(choice: dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
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
                raise invalid(f"no tool is called {name!r}", "tool_choice.name")
        case _:
            raise invalid("write auto, any, none, or tool with its name", "tool_choice.type")
    if not tools:
        raise invalid("there are no tools to choose from", "tool_choice")
    return ToolChoice("required", name)
