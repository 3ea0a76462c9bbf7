"""Reads the parameters of a request to /v1/chat/completions."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from leyden.server.gateway.dialects.chat.messages import read_messages
from leyden.server.gateway.dialects.chat.tools import custom_names, read_tool, read_tool_choice
from leyden.server.gateway.dialects.encoding import decode_body, given_of
from leyden.server.gateway.dialects.openai import CallParameters
from leyden.server.gateway.dialects.types import Format, GenerationRequest
from leyden.server.gateway.errors import invalid

_IGNORED = ("logit_bias", "audio", "prediction", "verbosity", "web_search_options")
"""Parameters that change the answers of OpenAI's service and have no effect here."""


class ChatRequest(CallParameters, frozen=True, kw_only=True):
    """The fields that the gateway reads; it records the others and ignores them."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    """The older form of `tools`."""
    function_call: str | dict[str, Any] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """As in vLLM; only `enable_thinking` is read."""
    continue_final_message: bool | None = None
    """As in vLLM: the last message is the beginning of the answer."""

    @property
    def reasoning(self) -> bool | None:
        """Whether the caller switches reasoning on or off."""
        switch = (self.chat_template_kwargs or {}).get("enable_thinking")
        if isinstance(switch, bool):
            return switch
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"


class AnswerForm(Struct, frozen=True):
    """How the caller wants its answer written."""

    streams_usage: bool
    """Whether a stream ends with the usage."""
    custom: frozenset[str]
    """The tools whose calls have an input in place of arguments."""
    functions: bool
    """Whether a tool call is written as `function_call`, its older form."""


def read_request(data: bytes) -> tuple[GenerationRequest, AnswerForm]:
    """Read a request body."""
    request, document = decode_body(data, ChatRequest)
    older = request.tools is None and bool(request.functions)
    given = [{"type": "function", "function": function} for function in request.functions or ()]
    field = "functions" if older else "tools"
    given = given if older else request.tools or []
    tools = tuple(read_tool(tool, f"{field}[{index}]") for index, tool in enumerate(given))
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    choice = (request.function_call, "function_call") if older else (request.tool_choice, "tool_choice")
    generation = GenerationRequest(
        model=request.model,
        messages=read_messages(request.messages, bool(request.continue_final_message)),
        tools=tools,
        tool_choice=read_tool_choice(choice[0], tools, choice[1]),
        sampling=request.sampling(min(limits, default=None)),
        n=request.choices,
        stream=bool(request.stream),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        format=_format(request.response_format),
        parallel_tool_calls=request.parallel_tool_calls is not False and not older,
        reasoning=request.reasoning,
        ignored=given_of(document, _IGNORED),
        request={name: value for name, value in document.items() if name not in ("messages", "tools", "functions")},
    )
    return generation, AnswerForm(request.streams_usage, custom_names(given), older)


def _format(given: dict[str, Any] | None) -> Format | None:
    match given or {"type": "text"}:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", "json_schema": {"schema": dict()}}:
            return given
    raise invalid("an answer is text, a json_object, or what the schema of a json_schema says", "response_format")
