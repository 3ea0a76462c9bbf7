"""Reads the body of a request to generateContent: names in two spellings, and schemas in the manner of OpenAPI."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from leyden.server.gateway.dialects.chat.tools import read_tool_choice
from leyden.server.gateway.dialects.encoding import decode_body, sampling_of
from leyden.server.gateway.dialects.google.contents import read_contents
from leyden.server.gateway.dialects.openai import SamplingParameters
from leyden.server.gateway.dialects.types import Format, GenerationRequest, ToolChoice
from leyden.server.gateway.errors import invalid

_CHOICES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required"}
_USER_DATA = frozenset(
    {"args", "response", "parameters", "parameters_json_schema", "response_schema", "response_json_schema", "labels"}
)
"""Fields whose content is not Google's."""
_INTEGERS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
"""Google writes integers of 64 bits as text."""


class _Thinking(Struct, frozen=True):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None

    @property
    def reasoning(self) -> bool | None:
        """Whether the caller switches reasoning on or off."""
        if self.thinking_budget is None and not self.thinking_level and not self.include_thoughts:
            return None
        return self.thinking_budget != 0


class _GenerationConfig(SamplingParameters, frozen=True, kw_only=True):
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=16)] | None = None
    candidate_count: Annotated[int, Meta(ge=1, le=128)] | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    thinking_config: _Thinking | None = None


class _FunctionCalling(Struct, frozen=True):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(Struct, frozen=True):
    function_calling_config: _FunctionCalling | None = None


class GoogleRequest(Struct, frozen=True):
    """The fields that the gateway reads; it records the others and ignores them."""

    contents: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system_instruction: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _GenerationConfig | None = None
    cached_content: str | None = None


class _CountRequest(Struct, frozen=True):
    contents: list[dict[str, Any]] | None = None
    generate_content_request: GoogleRequest | None = None


def read_request(data: bytes, model: str) -> tuple[GenerationRequest, bool]:
    """Read a request body; return also whether the answer shows the model's thoughts."""
    request, document = decode_body(data, GoogleRequest, normalise=with_field_names)
    config = request.generation_config or _GenerationConfig()
    others = {name: value for name, value in document.items() if name not in ("contents", "tools")}
    generation = replace(
        _read(request, model),
        sampling=sampling_of(config, config.max_output_tokens, config.stop_sequences),
        n=config.candidate_count or 1,
        top_logprobs=(config.logprobs or 0) if config.response_logprobs else None,
        request={"model": model, **others},
    )
    return generation, bool(config.thinking_config and config.thinking_config.include_thoughts)


def read_count(data: bytes, model: str) -> GenerationRequest:
    """Read a request to count tokens, which has contents or a whole request."""
    count, _ = decode_body(data, _CountRequest, normalise=with_field_names)
    if count.generate_content_request is None and not count.contents:
        raise invalid("there is nothing to count", "contents")
    return _read(count.generate_content_request or GoogleRequest(count.contents or []), model)


def _read(request: GoogleRequest, model: str) -> GenerationRequest:
    """Read what makes up a prompt, and the form of the answer."""
    if request.cached_content:
        raise invalid("contents are not stored here: send them all", "cached_content")
    config = request.generation_config or _GenerationConfig()
    tools = tuple(_read_tools(request.tools or ()))
    return GenerationRequest(
        model=model,
        messages=read_contents(request.system_instruction, request.contents),
        tools=tools,
        tool_choice=_read_tool_choice(request.tool_config or _ToolConfig(), tools),
        format=_format(config),
        reasoning=None if config.thinking_config is None else config.thinking_config.reasoning,
    )


def _read_tools(tools: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        for name, value in tool.items():
            if name != "function_declarations" and value is not None:
                how = "remove it, or have the agent run a tool that it describes in function_declarations"
                raise invalid(f"this tool is not run here: {how}", f"{field}.{name}")
        declared = tool.get("function_declarations") or []
        for function in declared if isinstance(declared, list) else [declared]:
            match function:
                case {"name": str(name)}:
                    schema = function.get("parameters_json_schema") or json_schema(function.get("parameters"))
                    about = {"description": function.get("description"), "parameters": schema}
                    given = {key: value for key, value in about.items() if value}
                    yield {"type": "function", "function": {"name": name, **given}}
                case _:
                    message = "function_declarations is a list of objects with a name"
                    raise invalid(message, f"{field}.function_declarations")


def _read_tool_choice(given: _ToolConfig, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    config, field = given.function_calling_config or _FunctionCalling(), "tool_config.function_calling_config"
    mode = config.mode or "AUTO"
    if mode == "NONE":
        return ToolChoice("none")
    if mode not in _CHOICES:
        raise invalid("write AUTO, ANY, NONE or VALIDATED", f"{field}.mode")
    if not config.allowed_function_names:
        return read_tool_choice(_CHOICES[mode], tools, field)
    allowed = [{"function": {"name": name}} for name in config.allowed_function_names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": _CHOICES[mode], "tools": allowed}}
    return read_tool_choice(choice, tools, field)


def _format(config: _GenerationConfig) -> Format | None:
    field = "generation_config.response_mime_type"
    schema = config.response_json_schema or json_schema(config.response_schema)
    match config.response_mime_type:
        case "application/json":
            if not schema:
                return {"type": "json_object"}
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        case None | "" | "text/plain" if not schema:
            return None
    raise invalid("write text/plain, or application/json if there is a schema", field)


def with_field_names(value: Any) -> Any:
    """Spell the names of all fields as `max_output_tokens`: Google's service reads them so and as `maxOutputTokens`.

    SDKs write integers as `5.0` too.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [with_field_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = ((re.sub(r"(?<=[a-z])[A-Z]", lambda found: f"_{found[0].lower()}", name), value[name]) for name in value)
    return {name: inner if name in _USER_DATA else with_field_names(inner) for name, inner in named}


def json_schema(schema: Any) -> Any:
    """Convert a schema of Google's to JSON Schema: types in lower case, `nullable` as a type."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for given, value in schema.items():
        match re.sub(r"_([a-z])", lambda found: found[1].upper(), given):
            case "propertyOrdering" | "nullable":
                pass
            case "type" if isinstance(value, str):
                made["type"] = value.lower()
            case "properties" if isinstance(value, dict):
                made["properties"] = {property: json_schema(inner) for property, inner in value.items()}
            case "anyOf" if isinstance(value, list):
                made["anyOf"] = [json_schema(option) for option in value]
            case "items" | "additionalProperties" as name:
                made[name] = json_schema(value)
            case name if name in _INTEGERS and isinstance(value, str) and value.isdecimal() and len(value) < 20:
                made[name] = int(value)
            case name:
                made[name] = value
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") is True else made
