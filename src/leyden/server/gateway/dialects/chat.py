"""The OpenAI chat dialect: /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from leyden.records import Sampling
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
    ToolCallDelta,
    ToolChoice,
)
from leyden.server.gateway.errors import STATUS, ErrorKind, GatewayError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class _StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(Struct, frozen=True):
    """The fields that mean something here; all others are recorded and ignored."""

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


def read(data: bytes) -> tuple[GenerationRequest, bool]:
    """A request as an ask, and whether its stream is to end with the usage."""
    try:
        document = msgspec.json.decode(data)
        request = msgspec.convert(document, ChatRequest)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        raise GatewayError(ErrorKind.INVALID, message, place.rstrip("`") or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(ErrorKind.INVALID, f"the body is not JSON: {error}") from error
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
    ask = GenerationRequest(
        model=request.model,
        messages=tuple(_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)),
        tools=tools,
        tool_choice=_choice(request.tool_choice, tools),
        sampling=Sampling(**sampling, max_tokens=min(limits, default=None), stop=tuple(s for s in stop if s)),
        n=request.n or 1,
        stream=bool(request.stream),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        format=_format(request.response_format),
        request={name: value for name, value in document.items() if name not in ("messages", "tools")},
    )
    return ask, request.stream_options is not None and request.stream_options.include_usage


def _message(message: dict[str, Any], place: str) -> Message:
    """A message in the one form that all dialects share."""
    role = message.get("role")
    match role:
        case "system" | "developer" | "user":
            named = {"name": message["name"]} if message.get("name") else {}
            kind = "system" if role == "developer" else role
            return {"role": kind, "content": _text(message.get("content"), place), **named}
        case "assistant":
            calls = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(message.get("tool_calls") or ())]
            content = _text(message.get("content"), place, refusal=message.get("refusal"))
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            said: Message = {"role": "assistant", "content": content}
            if isinstance(reasoning, str):
                said["reasoning_content"] = reasoning
            return {**said, "tool_calls": calls} if calls else said
        case "tool":
            if not isinstance(message.get("tool_call_id"), str):
                raise GatewayError(ErrorKind.INVALID, "a tool's message names its call", f"{place}.tool_call_id")
            content = _text(message.get("content"), place)
            return {"role": "tool", "tool_call_id": message["tool_call_id"], "content": content}
    roles = "system, developer, user, assistant or tool"
    raise GatewayError(ErrorKind.INVALID, f"{role!r} is not a role: write {roles}", f"{place}.role")


def _text(content: Any, place: str, refusal: Any = None) -> str:
    if content is None:
        return refusal if isinstance(refusal, str) else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(ErrorKind.INVALID, "content is text, or a list of parts", f"{place}.content")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind == "text" else "refusal") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            message = f"parts of type {kind!r} are not supported: this model takes text"
            raise GatewayError(ErrorKind.INVALID, message, f"{place}.content[{index}].type")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, place: str) -> dict[str, Any]:
    try:
        function = call["function"]
        id, name, arguments = call["id"], function["name"], function.get("arguments") or "{}"
    except (TypeError, KeyError) as error:
        raise GatewayError(ErrorKind.INVALID, "a tool call has an id and a function with a name", place) from error
    if not (isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise GatewayError(ErrorKind.INVALID, "id, name and arguments of a tool call are text", place)
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
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
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
    """Writes answers in this dialect: whole, or as a stream."""

    def __init__(self, ask: GenerationRequest, begun: AnswerStarted, usage: bool) -> None:
        self._ask, self._id, self._usage = ask, begun.id, usage
        self._created = int(time.time())

    async def whole(self, events: AsyncIterator[AnswerEvent]) -> bytes:
        """The answer in one piece."""
        choices: list[dict[str, Any]] = [
            {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None, "logprobs": None}
            for index in range(self._ask.n)
        ]
        done: list[AnswerFinished] = []
        async for event in events:
            match event:
                case TextDelta(choice, text, tokens):
                    message = choices[choice]["message"]
                    message["content"] = (message["content"] or "") + text
                    if self._ask.top_logprobs is not None:
                        logprobs = choices[choice]["logprobs"] = choices[choice]["logprobs"] or {"content": []}
                        logprobs["content"].extend(map(self._logprob, tokens))
                case ReasoningDelta(choice, text):
                    message = choices[choice]["message"]
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case ToolCallDelta(choice, _, call):
                    choices[choice]["message"].setdefault("tool_calls", []).append(_written(call))
                case AnswerFinished(choice):
                    choices[choice]["finish_reason"] = event.finish
                    done.append(event)
        for shown in choices:
            if shown["message"]["content"] is None and "tool_calls" not in shown["message"]:
                shown["message"]["content"] = ""
        return msgspec.json.encode({**self._head("chat.completion"), "choices": choices, "usage": _usage(done)})

    async def stream(self, events: AsyncGenerator[AnswerEvent, None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, in the order that the SDKs expect."""
        done: list[AnswerFinished] = []
        try:
            for choice in range(self._ask.n):
                yield self._chunk(choice, {"role": "assistant", "content": ""})
            async for event in events:
                match event:
                    case TextDelta(choice, text, tokens):
                        logprobs = None
                        if self._ask.top_logprobs is not None:
                            logprobs = {"content": [self._logprob(token) for token in tokens]}
                        yield self._chunk(choice, {"content": text}, logprobs=logprobs)
                    case ReasoningDelta(choice, text):
                        yield self._chunk(choice, {"reasoning_content": text})
                    case ToolCallDelta(choice, index, call):
                        yield self._chunk(choice, {"tool_calls": [{"index": index, **_written(call)}]})
                    case AnswerFinished(choice):
                        done.append(event)
                        yield self._chunk(choice, {}, finish=event.finish)
        except GatewayError as error:
            yield b"data: " + error_body(error) + b"\n\n"
            return
        finally:
            await events.aclose()
        if self._usage:
            yield _line({**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(done)})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self._id}", "object": kind, "created": self._created, "model": self._ask.model}

    def _chunk(self, choice: int, delta: Any, finish: str | None = None, logprobs: Any = None) -> bytes:
        shown = {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        usage: dict[str, None] = {"usage": None} if self._usage else {}
        return _line({**self._head("chat.completion.chunk"), "choices": [shown], **usage})

    def _logprob(self, token: TokenInfo) -> dict[str, Any]:
        return {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.data),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in token.top
            ],
        }


def error_body(error: GatewayError) -> bytes:
    """An error as OpenAI's SDKs read it."""
    status = STATUS[error.trouble]
    kind = "rate_limit_error" if status == 429 else _TYPES.get(status, "server_error")
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": kind, "param": error.param, "code": str(error.trouble)}}
    )


def model(name: str) -> dict[str, Any]:
    """A model, as OpenAI's SDKs read it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "leyden"}


def models(names: Sequence[str]) -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": list(map(model, names))}


def _written(call: Any) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(done: Sequence[AnswerFinished]) -> dict[str, Any]:
    prompt, completion = max(d.prompt_tokens for d in done), sum(d.completion_tokens for d in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(d.cached_tokens for d in done)},
    }


def _line(document: Any) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
