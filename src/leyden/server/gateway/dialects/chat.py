"""The OpenAI chat dialect: /v1/chat/completions and /v1/models."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from leyden.records import Sampling
from leyden.server.gateway.dialects.base import DialectRequest, DialectRoute, ModelAccess, RouteRequest
from leyden.server.gateway.dialects.encoding import decode_body, sse_event
from leyden.server.gateway.dialects.openai_error import openai_error
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    AnswerStarted,
    Format,
    GenerationRequest,
    Message,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallFinished,
    ToolCallStarted,
    ToolChoice,
)
from leyden.server.gateway.errors import ErrorKind, GatewayError, no_model


class _StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(Struct, frozen=True):
    """The fields that the gateway reads; it records the others and ignores them."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    """The older form of `tools`, which is refused."""


class ChatDialect:
    """Serves /v1/chat/completions, and /v1/models in OpenAI's format."""

    path = "/chat/completions"

    @property
    def extra_routes(self) -> Sequence[DialectRoute]:
        """List and describe the models."""
        return (DialectRoute("GET", "/models", _list_models), DialectRoute("GET", "/models/{model:path}", _get_model))

    async def read(self, body: bytes, access: ModelAccess) -> DialectRequest:
        """Read a chat completion request."""
        request, include_usage = read_request(body)
        return DialectRequest(request, lambda started: ChatWriter(request, started, include_usage))

    def write_error(self, error: GatewayError) -> bytes:
        """Write an error as OpenAI's SDKs read it."""
        return openai_error(error)


def read_request(data: bytes) -> tuple[GenerationRequest, bool]:
    """Read a request body; also return whether the stream ends with the usage."""
    request, document = decode_body(data, ChatRequest)
    if request.functions:
        raise GatewayError(ErrorKind.INVALID, "functions are offered as tools: send `tools`", "functions")
    tools = tuple(_tool(tool, index) for index, tool in enumerate(request.tools or ()))
    sampling = {
        name: value
        for name in Sampling.__struct_fields__
        if name not in ("stop", "max_tokens") and (value := getattr(request, name)) is not None
    }
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    generation = GenerationRequest(
        model=request.model,
        messages=tuple(_messages(request.messages)),
        tools=tools,
        tool_choice=_tool_choice(request.tool_choice, tools),
        sampling=Sampling(**sampling, max_tokens=min(limits, default=None), stop=tuple(s for s in stop if s)),
        n=request.n or 1,
        stream=bool(request.stream),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        format=_format(request.response_format),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        request={name: value for name, value in document.items() if name not in ("messages", "tools")},
    )
    return generation, request.stream_options is not None and request.stream_options.include_usage


def _messages(messages: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """Convert messages to the format that all dialects share; find the calls of tools' results that name none."""
    unanswered: dict[str, str] = {}  # by the id of a call, its tool
    for index, given in enumerate(messages):
        field = f"messages[{index}]"
        message = _message(given, field)
        if message["role"] == "assistant":
            unanswered = {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        elif message["role"] == "tool":
            message["tool_call_id"] = id = _answered_call(given, unanswered, field)
            unanswered.pop(id, None)
        yield message


def _answered_call(result: dict[str, Any], unanswered: Mapping[str, str], field: str) -> str:
    """Return the call that a tool's result is for: by `tool_call_id`, by `id`, by the tool's name, or the next one."""
    if isinstance(result.get("tool_call_id"), str):
        return str(result["tool_call_id"])
    if isinstance(result.get("id"), str) and result["id"] in unanswered:
        return str(result["id"])
    named = result.get("name") in unanswered.values()
    for id, tool in unanswered.items():
        if not named or tool == result["name"]:
            return id
    message = "a tool's message names its call, or follows one that is not answered"
    raise GatewayError(ErrorKind.INVALID, message, f"{field}.tool_call_id")


def _message(message: dict[str, Any], field: str) -> Message:
    """Convert a message to the format that all dialects share."""
    role = message.get("role")
    match role:
        case "system" | "developer" | "user":
            named = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
            kind = "system" if role == "developer" else role
            return {"role": kind, "content": _text(message.get("content"), field), **named}
        case "assistant":
            made = message.get("tool_calls") or []
            if not isinstance(made, list):
                raise GatewayError(ErrorKind.INVALID, "tool_calls is a list", f"{field}.tool_calls")
            calls = [_call(call, index, f"{field}.tool_calls[{index}]") for index, call in enumerate(made)]
            content = _text(message.get("content"), field, refusal=message.get("refusal"))
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            answer: Message = {"role": "assistant", "content": content}
            if isinstance(reasoning, str):
                answer["reasoning_content"] = reasoning
            return {**answer, "tool_calls": calls} if calls else answer
        case "tool":
            content = _text(message.get("content"), field)
            return {"role": "tool", "tool_call_id": message.get("tool_call_id"), "content": content}
    roles = "system, developer, user, assistant or tool"
    raise GatewayError(ErrorKind.INVALID, f"{role!r} is not a role: write {roles}", f"{field}.role")


def _text(content: Any, field: str, refusal: Any = None) -> str:
    if content is None:
        return refusal if isinstance(refusal, str) else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(ErrorKind.INVALID, "content is text, or a list of parts", f"{field}.content")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind == "text" else "refusal") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            message = f"parts of type {kind!r} are not supported: this model takes text"
            raise GatewayError(ErrorKind.INVALID, message, f"{field}.content[{index}].type")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, index: int, field: str) -> dict[str, Any]:
    try:
        function = call["function"]
        id, name, arguments = call.get("id") or f"call_{index}", function["name"], function.get("arguments") or "{}"
    except (TypeError, KeyError, AttributeError) as error:
        raise GatewayError(ErrorKind.INVALID, "a tool call has a function with a name", field) from error
    if not (isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise GatewayError(ErrorKind.INVALID, "id, name and arguments of a tool call are text", field)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _format(given: dict[str, Any] | None) -> Format | None:
    match given or {"type": "text"}:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", "json_schema": {"schema": dict()}}:
            return given
    why = "an answer is text, a json_object, or what the schema of a json_schema says"
    raise GatewayError(ErrorKind.INVALID, why, "response_format")


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise GatewayError(
            ErrorKind.INVALID, "only tools of type function, with a name, are supported", f"tools[{index}]"
        )
    # An absent field means the same, and the other dialects leave it out.
    given = {
        name: value for name, value in function.items() if value is not None and (name, value) != ("strict", False)
    }
    return {"type": "function", "function": given}


def _tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            name = None
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in (tool["function"]["name"] for tool in tools):
                raise GatewayError(ErrorKind.INVALID, f"no tool is called {name!r}", "tool_choice")
        case _:
            raise GatewayError(ErrorKind.INVALID, "write auto, none, required or a function's name", "tool_choice")
    if not tools:
        raise GatewayError(ErrorKind.INVALID, "there are no tools to choose from", "tool_choice")
    return ToolChoice("required", name)


class ChatWriter:
    """Writes chat completions, whole or as chunks."""

    def __init__(self, request: GenerationRequest, started: AnswerStarted, include_usage: bool) -> None:
        self._request, self._id, self._include_usage = request, started.id, include_usage
        self._created = int(time.time())
        self._finished: list[AnswerFinished] = []

    def whole(self, events: Sequence[AnswerEvent]) -> bytes:
        """Write a `chat.completion` object."""
        choices: list[dict[str, Any]] = [
            {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None, "logprobs": None}
            for index in range(self._request.n)
        ]
        for event in events:
            match event:
                case TextDelta(choice, text, tokens):
                    message = choices[choice]["message"]
                    message["content"] = (message["content"] or "") + text
                    if self._request.top_logprobs is not None:
                        logprobs = choices[choice]["logprobs"] = choices[choice]["logprobs"] or {"content": []}
                        logprobs["content"].extend(map(_logprob, tokens))
                case ReasoningDelta(choice, text):
                    message = choices[choice]["message"]
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case ToolCallFinished(choice, _, call):
                    choices[choice]["message"].setdefault("tool_calls", []).append(_tool_call(call))
                case AnswerFinished(choice):
                    choices[choice]["finish_reason"] = event.finish
                    self._finished.append(event)
        for written in choices:
            if written["message"]["content"] is None and "tool_calls" not in written["message"]:
                written["message"]["content"] = ""
        return msgspec.json.encode(
            {**self._head("chat.completion"), "choices": choices, "usage": _usage(self._finished)}
        )

    def stream_start(self) -> bytes:
        """Open each choice with its role."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, opening) for choice in range(self._request.n))

    def stream_event(self, event: AnswerEvent) -> bytes:
        """Write one `chat.completion.chunk`."""
        match event:
            case TextDelta(choice, text, tokens):
                logprobs = None
                if self._request.top_logprobs is not None:
                    logprobs = {"content": [_logprob(token) for token in tokens]}
                return self._chunk(choice, {"content": text}, logprobs=logprobs)
            case ReasoningDelta(choice, text):
                return self._chunk(choice, {"reasoning_content": text})
            case ToolCallStarted(choice, index, id, name):
                return self._chunk(choice, {"tool_calls": [{"index": index, **_tool_call(ToolCall(id, name, ""))}]})
            case ToolArgumentsDelta(choice, index, text):
                return self._chunk(choice, {"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            case AnswerFinished(choice):
                self._finished.append(event)
                return self._chunk(choice, {}, finish=event.finish)
        return b""

    def stream_end(self) -> bytes:
        """Write the usage if the caller wants it, then `[DONE]`."""
        usage = b""
        if self._include_usage:
            usage = self._event({"choices": [], "usage": _usage(self._finished)})
        return usage + sse_event(b"[DONE]")

    def stream_error(self, error: GatewayError) -> bytes:
        """Write the error as the last event."""
        return sse_event(openai_error(error))

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self._id}", "object": kind, "created": self._created, "model": self._request.model}

    def _event(self, fields: dict[str, Any]) -> bytes:
        return sse_event(msgspec.json.encode({**self._head("chat.completion.chunk"), **fields}))

    def _chunk(self, choice: int, delta: Any, finish: str | None = None, logprobs: Any = None) -> bytes:
        choices = [{"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]
        usage: dict[str, None] = {"usage": None} if self._include_usage else {}
        return self._event({"choices": choices, **usage})


async def _list_models(access: ModelAccess, request: RouteRequest) -> bytes:
    """List the models that the caller may use."""
    models = [_model(name) for name in await access.model_names()]
    return msgspec.json.encode({"object": "list", "data": models})


async def _get_model(access: ModelAccess, request: RouteRequest) -> bytes:
    """Describe a model."""
    name = request.path["model"]
    if not await access.serves(name):
        raise no_model(name)
    return msgspec.json.encode(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "leyden"}


def _logprob(token: TokenInfo) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.data),
        "top_logprobs": [{"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in token.top],
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(finished: Sequence[AnswerFinished]) -> dict[str, Any]:
    """Sum up the choices of a request, which share their prompt."""
    prompt, completion = max(f.prompt_tokens for f in finished), sum(f.completion_tokens for f in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(f.cached_tokens for f in finished)},
        "completion_tokens_details": {"reasoning_tokens": sum(f.reasoning_tokens for f in finished)},
    }
