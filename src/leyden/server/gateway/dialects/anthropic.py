"""The Anthropic Messages dialect: /v1/messages and /v1/messages/count_tokens.

Text stands joined where it came in blocks, tool results before the text that was sent beside them, and the blocks of
assistant messages that follow each other are one answer, as the real service has it.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

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
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)
from leyden.server.gateway.errors import STATUS, ErrorKind, GatewayError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_WITHOUT = {
    "thread": "conversations are not kept here for the caller: send all of the messages",
    "compaction": "conversations are not summed up here: send the messages that are to be kept",
    "mcp_servers": "tools of MCP servers are not supported",
}
_OURS = ("text", "thinking", "tool_use", "tool_result")
_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class CountRequest(Struct, frozen=True):
    """What a prompt is made of; all other fields are recorded and ignored."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thread: Any = None
    compaction: Any = None
    mcp_servers: Any = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """And how it is to be answered."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_Request = TypeVar("_Request", bound=CountRequest)


def read(data: bytes) -> GenerationRequest:
    """A request for an answer."""
    request, document = _decode(data, MessagesRequest)
    drawn = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
    sampling = Sampling(
        **{name: value for name, value in drawn.items() if value is not None},
        max_tokens=request.max_tokens,
        stop=tuple(stop for stop in request.stop_sequences or () if stop),
    )
    others = {name: value for name, value in document.items() if name not in ("messages", "system", "tools")}
    return replace(_ask(request), sampling=sampling, stream=bool(request.stream), request=others)


def read_count(data: bytes) -> GenerationRequest:
    """A request to count the tokens of a prompt."""
    return _ask(_decode(data, CountRequest)[0])


def _decode(data: bytes, wanted: type[_Request]) -> tuple[_Request, dict[str, Any]]:
    try:
        document = msgspec.json.decode(data)
        return msgspec.convert(document, wanted), document
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        param = re.sub(r"\[(\d+)\]", r".\1", place.rstrip("`"))
        raise GatewayError(ErrorKind.INVALID, message, param or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(ErrorKind.INVALID, f"the body is not JSON: {error}") from error


def _ask(request: CountRequest) -> GenerationRequest:
    asked = {
        "thread": request.thread,
        "compaction": request.compaction,
        "mcp_servers": request.mcp_servers,
    }
    for param, given in asked.items():
        if given:
            raise GatewayError(ErrorKind.INVALID, _WITHOUT[param], param)
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or ()))
    said: list[Message] = []
    if request.system:
        said.append({"role": "system", "content": _text(request.system, "system")})
    for index, message in enumerate(request.messages):
        _add(said, message, f"messages.{index}")
    if said[-1]["role"] == "assistant":
        why = "the last message is the user's: answers that are begun for the model are not supported"
        raise GatewayError(ErrorKind.INVALID, why, f"messages.{len(request.messages) - 1}.role")
    choice = _choice(request.tool_choice, tools)
    wanted = _format(request)
    return GenerationRequest(model=request.model, messages=tuple(said), tools=tools, tool_choice=choice, format=wanted)


def _format(request: CountRequest) -> Format | None:
    """The format of the answer, which older clients ask for in a field of its own."""
    match (request.output_config or {}).get("format") or request.output_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "schema": dict() as schema}:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    why = "an answer is text, or what the schema of a json_schema says"
    raise GatewayError(ErrorKind.INVALID, why, "output_config.format")


def _add(said: list[Message], message: dict[str, Any], place: str) -> None:
    """Put a message behind those before it, in the one form that all dialects share."""
    content, where = message.get("content"), f"{place}.content"
    match message.get("role"):
        case "user":
            said.extend(_asked(content, where))
        case "assistant":
            if not said or said[-1]["role"] != "assistant":
                said.append({"role": "assistant", "content": ""})
            _answer(said[-1], content, where)
        case "system":
            said.append({"role": "system", "content": _text(content, where)})
        case role:
            raise GatewayError(ErrorKind.INVALID, f"{role!r} is not a role: write user or assistant", f"{place}.role")


def _asked(content: Any, place: str) -> Iterator[Message]:
    texts: list[str] = []
    results = False
    for block, where in _blocks(content, place):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(id)}:
                results = True
                result = _text(block.get("content") or "", f"{where}.content")
                failed = {"is_error": True} if block.get("is_error") else {}
                yield {"role": "tool", "tool_call_id": id, "content": result, **failed}
            case _:
                raise _unfit(block, where)
    if texts or not results:
        yield {"role": "user", "content": "".join(texts)}


def _answer(said: Message, content: Any, place: str) -> None:
    """Add the blocks of an assistant's message to its answer."""
    for block, where in _blocks(content, place):
        match block:
            case {"type": "text", "text": str(text)}:
                said["content"] += text
            case {"type": "thinking", "thinking": str(text)}:
                said["reasoning_content"] = said.get("reasoning_content", "") + text
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
                function = {"name": name, "arguments": msgspec.json.encode(given).decode()}
                said.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
            case _:
                raise _unfit(block, where)


def _text(content: Any, place: str) -> str:
    texts = []
    for block, where in _blocks(content, place):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _unfit(block, where)
    return "".join(texts)


def _blocks(content: Any, place: str) -> Iterator[tuple[Any, str]]:
    """The blocks of a content, each with its place; bare text is one."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, place
    elif isinstance(content, list):
        yield from ((block, f"{place}.{index}") for index, block in enumerate(content))
    else:
        raise GatewayError(ErrorKind.INVALID, "this is text, or a list of blocks", place)


def _unfit(block: Any, place: str) -> GatewayError:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in _OURS:
        return GatewayError(ErrorKind.INVALID, f"a block of type {kind!r} does not belong here, or is not whole", place)
    message = f"blocks of type {kind!r} are not supported: this model takes text"
    return GatewayError(ErrorKind.INVALID, message, f"{place}.type")


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = f"tools of type {tool['type']!r} are not supported: only those that the caller runs"
        raise GatewayError(ErrorKind.INVALID, message, f"{place}.type")
    match tool:
        case {"name": str(name), "input_schema": dict(schema)}:
            about = {"description": tool["description"]} if tool.get("description") else {}
            return {"type": "function", "function": {"name": name, **about, "parameters": schema}}
    raise GatewayError(ErrorKind.INVALID, "a tool has a name and an input_schema", place)


def _choice(choice: dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
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


class MessagesWriter:
    """Writes an answer in this dialect: whole, or as a stream."""

    def __init__(self, ask: GenerationRequest, begun: AnswerStarted) -> None:
        self._ask, self._begun = ask, begun

    async def whole(self, events: AsyncIterator[AnswerEvent]) -> bytes:
        """The answer in one piece."""
        blocks: list[dict[str, Any]] = []
        done: AnswerFinished | None = None
        async for event in events:
            match event:
                case TextDelta(_, text) | ReasoningDelta(_, text) if text:
                    kind = _kind(event)
                    if not blocks or blocks[-1]["type"] != kind:
                        blocks.append(dict(_BLOCKS[kind]))
                    blocks[-1][kind] += text
                case ToolCallDelta(_, _, call):
                    blocks.append({**_tool_use(call), "input": _input(call)})
                case AnswerFinished():
                    done = event
        return msgspec.json.encode(self._message(blocks, done))

    async def stream(self, events: AsyncGenerator[AnswerEvent, None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, in the order that the SDKs expect."""
        index, kind = -1, ""
        try:
            yield _line("message_start", message=self._message([], None)) + _line("ping")
            async for event in events:
                match event:
                    case TextDelta(_, text) | ReasoningDelta(_, text) if text:
                        turned = b""
                        if kind != _kind(event):
                            turned, index, kind = _close(index, kind), index + 1, _kind(event)
                            turned += _line("content_block_start", index=index, content_block=_BLOCKS[kind])
                        yield turned + _delta(index, f"{kind}_delta", kind, text)
                    case ToolCallDelta(_, _, call):
                        turned, index, kind = _close(index, kind), index + 1, "tool_use"
                        turned += _line("content_block_start", index=index, content_block=_tool_use(call))
                        given = msgspec.json.encode(_input(call)).decode()
                        yield turned + _delta(index, "input_json_delta", "partial_json", given)
                    case AnswerFinished():
                        ending = _line("message_delta", delta=_ending(event), usage=_usage(event))
                        yield _close(index, kind) + ending + _line("message_stop")
        except GatewayError as error:
            yield b"event: error\ndata: " + error_body(error) + b"\n\n"
        finally:
            await events.aclose()

    def _message(self, content: list[dict[str, Any]], done: AnswerFinished | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._begun.id}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.model,
            "content": content,
            **_ending(done),
            "usage": _usage(done or self._begun),
        }


def count_body(tokens: int) -> bytes:
    """The answer to a request to count."""
    return msgspec.json.encode({"input_tokens": tokens})


class ModelListQuery(Struct, frozen=True):
    """Which part of a list is asked for."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


def model(name: str) -> dict[str, Any]:
    """A model, as Anthropic's SDKs read it."""
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def models(names: Sequence[str], window: ModelListQuery) -> dict[str, Any]:
    """A page of the list of models."""
    start = names.index(window.after_id) + 1 if window.after_id in names else 0
    end = names.index(window.before_id) if window.before_id in names else len(names)
    if window.before_id in names:
        start = max(start, end - window.limit)
    page = names[start : min(end, start + window.limit)]
    more = start > 0 if window.before_id in names else start + len(page) < len(names)
    ends = {"first_id": page[0] if page else None, "last_id": page[-1] if page else None}
    return {"data": list(map(model, page)), "has_more": more, **ends}


def error_body(error: GatewayError) -> bytes:
    """An error as Anthropic's SDKs read it; the field to change stands before the message, for want of a place."""
    kind = _TYPES.get(STATUS[error.trouble], "overloaded_error" if error.retry_after else "api_error")
    message = f"{error.param}: {error.message}" if error.param else error.message
    if error.trouble is ErrorKind.TOO_LONG:  # the words that agents look for
        message = f"prompt is too long: {error.message}"
    details = {"details": {"error_code": "thread_unsupported_request", "unsupported": []}}  # the SDK goes on without
    shown = {"type": kind, "message": message, **(details if error.param == "thread" else {})}
    return msgspec.json.encode({"type": "error", "error": shown})


def _kind(event: TextDelta | ReasoningDelta) -> Literal["text", "thinking"]:
    return "text" if isinstance(event, TextDelta) else "thinking"


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _input(call: ToolCall) -> dict[str, Any]:
    """A call's arguments; an object by the rules of this dialect, so that any others stand in one as they are."""
    try:
        given = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"arguments": call.arguments}


def _ending(done: AnswerFinished | None) -> dict[str, str | None]:
    if done is None:
        return {"stop_reason": None, "stop_sequence": None}
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "stop_sequence" if done.stop else "end_turn"}
    return {"stop_reason": reasons[done.finish], "stop_sequence": done.stop}


def _usage(at: AnswerStarted | AnswerFinished) -> dict[str, int]:
    """Tokens so far; unlike OpenAI's, `input_tokens` are only those that were not there before."""
    return {
        "input_tokens": at.prompt_tokens - at.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": at.cached_tokens,
        "output_tokens": at.completion_tokens if isinstance(at, AnswerFinished) else 0,
    }


def _close(index: int, kind: str) -> bytes:
    """The end of the block that is open, if one is."""
    if index < 0:
        return b""
    signed = _delta(index, "signature_delta", "signature", "") if kind == "thinking" else b""
    return signed + _line("content_block_stop", index=index)


def _delta(index: int, kind: str, field: str, text: str) -> bytes:
    return _line("content_block_delta", index=index, delta={"type": kind, field: text})


def _line(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"
