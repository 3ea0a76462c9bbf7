"""The Anthropic Messages dialect: /v1/messages, /v1/messages/count_tokens and /v1/models.

As in Anthropic's service, text blocks are joined, tool results come before the text sent with them, and consecutive
assistant messages are one answer.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from leyden.records import Sampling
from leyden.server.gateway.dialects.base import DialectRequest, DialectRoute, ModelAccess, RouteRequest
from leyden.server.gateway.dialects.encoding import decode_body, sse_event
from leyden.server.gateway.dialects.types import (
    LOADED_TOOLS,
    AnswerEvent,
    AnswerFinished,
    AnswerStarted,
    Format,
    GenerationRequest,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallFinished,
    ToolCallStarted,
    ToolChoice,
)
from leyden.server.gateway.errors import STATUS, ErrorKind, GatewayError, no_model

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_UNSUPPORTED = {
    "thread": "conversations are not stored for the caller: send all messages",
    "compaction": "conversations are not summarised here: send the messages to keep",
    "mcp_servers": "tools of MCP servers are not supported",
}
_SUPPORTED_BLOCKS = ("text", "thinking", "tool_use", "tool_result", "tool_reference")
_LOADED = "These tools can be called now:"
_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


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
    output_config: dict[str, Any] | None = None
    output_format: Any = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """A request for a message: the prompt, and how to answer it."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class ModelListQuery(Struct, frozen=True):
    """The page of the model list that a client wants."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


class AnthropicDialect:
    """Serves /v1/messages, its token counts, and /v1/models in Anthropic's format."""

    path = "/messages"

    @property
    def extra_routes(self) -> Sequence[DialectRoute]:
        """Count tokens; list and describe the models for clients that send Anthropic's version header."""
        return (
            DialectRoute("POST", "/messages/count_tokens", _count_tokens),
            DialectRoute("GET", "/models", _list_models, header="anthropic-version"),
            DialectRoute("GET", "/models/{model:path}", _get_model, header="anthropic-version"),
        )

    async def read(self, body: bytes, access: ModelAccess) -> DialectRequest:
        """Read a request for a message."""
        request = read_request(body)
        return DialectRequest(request, lambda started: MessagesWriter(request, started))

    def write_error(self, error: GatewayError) -> bytes:
        """Write an error as Anthropic's SDKs read it. The format has no field for the parameter: the message names it.

        A client that sent `thread` gets the code that makes its SDK continue without threads.
        """
        kind = _TYPES.get(STATUS[error.kind], "overloaded_error" if error.retry_after else "api_error")
        message = f"{error.param}: {error.message}" if error.param else error.message
        if error.kind is ErrorKind.TOO_LONG:  # agents look for these words
            message = f"prompt is too long: {error.message}"
        body: dict[str, Any] = {"type": kind, "message": message}
        if error.param == "thread":
            body["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
        return msgspec.json.encode({"type": "error", "error": body})


def read_request(data: bytes) -> GenerationRequest:
    """Read the body of a request for a message."""
    request, document = decode_body(data, MessagesRequest, dotted=True)
    given = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
    sampling = Sampling(
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=request.max_tokens,
        stop=tuple(stop for stop in request.stop_sequences or () if stop),
    )
    others = {name: value for name, value in document.items() if name not in ("messages", "system", "tools")}
    generation = _generation(request)
    if generation.messages[-1].get("tool_calls"):
        why = "the last message must be the user's, or text that the answer begins with"
        raise GatewayError(ErrorKind.INVALID, why, f"messages.{len(request.messages) - 1}")
    return replace(generation, sampling=sampling, stream=bool(request.stream), request=others)


def _generation(request: CountRequest) -> GenerationRequest:
    unsupported = {
        "thread": request.thread,
        "compaction": request.compaction,
        "mcp_servers": request.mcp_servers,
    }
    for param, given in unsupported.items():
        if given:
            raise GatewayError(ErrorKind.INVALID, _UNSUPPORTED[param], param)
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or ())]
    reader = _MessageReader({tool["function"]["name"]: tool for tool in tools})
    if request.system:
        reader.messages.append({"role": "system", "content": _text(request.system, "system")})
    for index, message in enumerate(request.messages):
        reader.add(message, f"messages.{index}")
    deferred = [bool(tool.get("defer_loading")) for tool in request.tools or ()]
    return GenerationRequest(
        model=request.model,
        messages=tuple(reader.messages),
        tools=tuple(tool for tool, later in zip(tools, deferred, strict=True) if not later),
        tool_choice=_tool_choice(request.tool_choice, tools),
        parallel_tool_calls=not (request.tool_choice or {}).get("disable_parallel_tool_use"),
        format=_format(request),
    )


def _format(request: CountRequest) -> Format | None:
    """Read the format of the answer; older clients send it as `output_format`."""
    match (request.output_config or {}).get("format") or request.output_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "schema": dict() as schema}:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    why = "the format must be text, or json_schema with a schema"
    raise GatewayError(ErrorKind.INVALID, why, "output_config.format")


class _MessageReader:
    """Collects messages in the format that all dialects share."""

    def __init__(self, tools: dict[str, dict[str, Any]]) -> None:
        self.messages: list[Message] = []
        self._tools = tools
        """All tools by name, deferred ones included."""

    def add(self, message: dict[str, Any], field: str) -> None:
        """Add a message."""
        content, content_field = message.get("content"), f"{field}.content"
        match message.get("role"):
            case "user":
                self.messages.extend(self._user_messages(content, content_field))
            case "assistant":
                if not self.messages or self.messages[-1]["role"] != "assistant":
                    self.messages.append({"role": "assistant", "content": ""})
                _extend_answer(self.messages[-1], content, content_field)
            case "system":
                self.messages.append({"role": "system", "content": _text(content, content_field)})
            case role:
                message_ = f"{role!r} is not a role: write user or assistant"
                raise GatewayError(ErrorKind.INVALID, message_, f"{field}.role")

    def _user_messages(self, content: Any, field: str) -> Iterator[Message]:
        """Split a user's content into tool messages and one user message."""
        texts: list[str] = []
        results = False
        for block, block_field in _blocks(content, field):
            match block:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case {"type": "tool_result", "tool_use_id": str(id)}:
                    results = True
                    failed = {"is_error": True} if block.get("is_error") else {}
                    result = self._tool_result(block.get("content") or "", f"{block_field}.content")
                    yield {"role": "tool", "tool_call_id": id, **result, **failed}
                case _:
                    raise _bad_block(block, block_field)
        if texts or not results:
            yield {"role": "user", "content": "".join(texts)}

    def _tool_result(self, content: Any, field: str) -> Message:
        """Read a tool's result. A reference to a deferred tool shows its definition from here on."""
        texts, loaded = [], []
        for block, block_field in _blocks(content, field):
            match block:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case {"type": "tool_reference", "tool_name": str(name)}:
                    if name not in self._tools:
                        raise GatewayError(ErrorKind.INVALID, f"no tool is called {name!r}", f"{block_field}.tool_name")
                    loaded.append(self._tools[name])
                case _:
                    raise _bad_block(block, block_field)
        if not loaded:
            return {"content": "".join(texts)}
        shown = [json.dumps(tool, ensure_ascii=False) for tool in loaded]
        return {"content": "\n".join([*texts, _LOADED, *shown]), LOADED_TOOLS: loaded}


def _extend_answer(answer: Message, content: Any, field: str) -> None:
    """Add the blocks of an assistant's message to an answer."""
    for block, block_field in _blocks(content, field):
        match block:
            case {"type": "text", "text": str(text)}:
                answer["content"] += text
            case {"type": "thinking", "thinking": str(text)}:
                answer["reasoning_content"] = answer.get("reasoning_content", "") + text
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
                function = {"name": name, "arguments": msgspec.json.encode(given).decode()}
                answer.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
            case _:
                raise _bad_block(block, block_field)


def _text(content: Any, field: str) -> str:
    texts = []
    for block, block_field in _blocks(content, field):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _bad_block(block, block_field)
    return "".join(texts)


def _blocks(content: Any, field: str) -> Iterator[tuple[Any, str]]:
    """Yield the blocks of a content with their field names; plain text is one block."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, field
    elif isinstance(content, list):
        yield from ((block, f"{field}.{index}") for index, block in enumerate(content))
    else:
        raise GatewayError(ErrorKind.INVALID, "this must be text or a list of blocks", field)


def _bad_block(block: Any, field: str) -> GatewayError:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in _SUPPORTED_BLOCKS:
        return GatewayError(
            ErrorKind.INVALID, f"a block of type {kind!r} does not belong here, or lacks a field", field
        )
    message = f"blocks of type {kind!r} are not supported: this model takes text"
    return GatewayError(ErrorKind.INVALID, message, f"{field}.type")


def _tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
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


def _tool_choice(choice: dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
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
    """Writes a message, whole or as events. The content is a list of blocks; one block at a time is open."""

    def __init__(self, request: GenerationRequest, started: AnswerStarted) -> None:
        self._request, self._started = request, started
        self._index = -1
        self._open = ""
        """The type of the open block; empty before the first one."""
        self._call_blocks: list[int] = []
        """The block of each tool call."""

    def whole(self, events: Sequence[AnswerEvent]) -> bytes:
        """Write a `message` object."""
        blocks: list[dict[str, Any]] = []
        finished: AnswerFinished | None = None
        for event in events:
            match event:
                case TextDelta(_, text) | ReasoningDelta(_, text) if text:
                    kind = _block_type(event)
                    if not blocks or blocks[-1]["type"] != kind:
                        signed = {"signature": self._signature} if kind == "thinking" else {}
                        blocks.append({**_BLOCKS[kind], **signed})
                    blocks[-1][kind] += text
                case ToolCallFinished(_, _, call):
                    blocks.append({**_tool_use(call.id, call.name), "input": _input(call)})
                case AnswerFinished():
                    finished = event
        return msgspec.json.encode(self._message(blocks, finished))

    def stream_start(self) -> bytes:
        """Write the empty message."""
        return _event("message_start", message=self._message([], None)) + _event("ping")

    def stream_event(self, event: AnswerEvent) -> bytes:
        """Write a delta of the open block; open and close blocks where the type changes."""
        match event:
            case TextDelta(_, text) | ReasoningDelta(_, text) if text:
                kind = _block_type(event)
                opening = self._open_block(kind, _BLOCKS[kind]) if self._open != kind else b""
                return opening + self._delta(f"{kind}_delta", kind, text)
            case ToolCallStarted(_, _, id, name):
                opening = self._open_block("tool_use", _tool_use(id, name))
                self._call_blocks.append(self._index)
                return opening
            case ToolArgumentsDelta(_, index, text):
                delta = {"type": "input_json_delta", "partial_json": text}
                return _event("content_block_delta", index=self._call_blocks[index], delta=delta)
            case AnswerFinished():
                ending = _event("message_delta", delta=_stop_reason(event), usage=_usage(event))
                return self._close_block() + ending + _event("message_stop")
        return b""

    def stream_end(self) -> bytes:
        """Write nothing: `message_stop` is the last event."""
        return b""

    def stream_error(self, error: GatewayError) -> bytes:
        """Write the error as the last event."""
        return sse_event(AnthropicDialect().write_error(error), "error")

    @property
    def _signature(self) -> str:
        """Signs thinking. Clients keep only signed blocks; nothing is checked when they come back."""
        return base64.b64encode(self._started.id.encode()).decode()

    def _message(self, content: list[dict[str, Any]], finished: AnswerFinished | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._started.id}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            **_stop_reason(finished),
            "usage": _usage(finished or self._started),
        }

    def _open_block(self, kind: str, block: dict[str, Any]) -> bytes:
        closing = self._close_block()
        self._index, self._open = self._index + 1, kind
        return closing + _event("content_block_start", index=self._index, content_block=block)

    def _close_block(self) -> bytes:
        if not self._open:
            return b""
        signature = self._delta("signature_delta", "signature", self._signature) if self._open == "thinking" else b""
        return signature + _event("content_block_stop", index=self._index)

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, field: text})


async def _count_tokens(access: ModelAccess, request: RouteRequest) -> bytes:
    """Count the tokens of a prompt."""
    counted, _ = decode_body(request.body, CountRequest, dotted=True)
    return msgspec.json.encode({"input_tokens": await access.count_tokens(_generation(counted))})


async def _list_models(access: ModelAccess, request: RouteRequest) -> bytes:
    """List the models that the caller may use."""
    try:
        query = msgspec.convert(request.query, ModelListQuery, strict=False)
    except msgspec.ValidationError as error:
        raise GatewayError(ErrorKind.INVALID, str(error)) from error
    return msgspec.json.encode(_page(await access.model_names(), query))


async def _get_model(access: ModelAccess, request: RouteRequest) -> bytes:
    """Describe a model."""
    name = request.path["model"]
    if not await access.serves(name):
        raise no_model(name)
    return msgspec.json.encode(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _page(names: Sequence[str], query: ModelListQuery) -> dict[str, Any]:
    """Cut a page out of the list of models."""
    start = names.index(query.after_id) + 1 if query.after_id in names else 0
    end = names.index(query.before_id) if query.before_id in names else len(names)
    if query.before_id in names:
        start = max(start, end - query.limit)
    page = names[start : min(end, start + query.limit)]
    more = start > 0 if query.before_id in names else start + len(page) < len(names)
    ends = {"first_id": page[0] if page else None, "last_id": page[-1] if page else None}
    return {"data": list(map(_model, page)), "has_more": more, **ends}


def _block_type(event: TextDelta | ReasoningDelta) -> Literal["text", "thinking"]:
    return "text" if isinstance(event, TextDelta) else "thinking"


def _tool_use(id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": {}}


def _input(call: ToolCall) -> dict[str, Any]:
    """Decode a call's arguments. This dialect requires an object: anything else is wrapped in one as text."""
    try:
        given = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"arguments": call.arguments}


def _stop_reason(finished: AnswerFinished | None) -> dict[str, str | None]:
    if finished is None:
        return {"stop_reason": None, "stop_sequence": None}
    reasons = {
        "tool_calls": "tool_use",
        "length": "max_tokens",
        "stop": "stop_sequence" if finished.stop else "end_turn",
    }
    return {"stop_reason": reasons[finished.finish], "stop_sequence": finished.stop}


def _usage(at: AnswerStarted | AnswerFinished) -> dict[str, int]:
    """Count the tokens so far; unlike OpenAI's, `input_tokens` leaves out the cached ones."""
    return {
        "input_tokens": at.prompt_tokens - at.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": at.cached_tokens,
        "output_tokens": at.completion_tokens if isinstance(at, AnswerFinished) else 0,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event(msgspec.json.encode({"type": kind, **fields}), kind)
