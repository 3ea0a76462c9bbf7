"""The request and the answer events that all dialects share.

Messages have the format of the OpenAI chat API, normalised: `content` is text, tool calls have ids and JSON arguments.
"""

from typing import Any, Literal

from msgspec import Struct

from leyden.records import Sampling

FinishReason = Literal["stop", "length", "tool_calls"]
Message = dict[str, Any]
Format = dict[str, Any]
"""The format of an answer as the OpenAI chat API writes it: `json_object` or `json_schema`."""

LOADED_TOOLS = "loaded_tools"
"""The key of a tool's message for the tools that its content shows to the model."""
PREFIX = "prefix"
"""The key of the last message, if it is the assistant's and begins the answer: the model continues it."""


class ToolChoice(Struct, frozen=True):
    """Whether the model may, must not or must call a tool, and which."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allowed: frozenset[str] | None = None
    """The tools that may be called; None: all. The prompt shows the others too."""


class GenerationRequest(Struct, frozen=True):
    """A model call as the agent requests it."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    sampling: Sampling = Sampling()
    n: int = 1
    stream: bool = False
    top_logprobs: int | None = None
    """How many alternatives to return with each token; None returns no logprobs at all."""
    format: Format | None = None
    """None for free text."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several tool calls; if not, it ends after the first."""
    truncates: bool = False
    """Whether the oldest messages are dropped if the prompt does not fit into the model's context."""
    prompt: str | tuple[int, ...] | None = None
    """A text, or its tokens, that the model continues as it is; it has no messages then."""
    prompt_logprobs: bool = False
    """Whether to return the logprobs of the prompt's tokens, with `top_logprobs` alternatives."""
    reasoning: bool | None = None
    """Whether the model reasons before it answers; None: as its template says."""
    ignored: tuple[str, ...] = ()
    """The parameters of the request that have no effect here, though they have one in the API's own service."""
    request: Any = None
    """The other fields of the request, for the record."""

    def may_call(self, tool: str) -> bool:
        """Return whether a call of a tool is a call, and not text. A tool that does not exist may be called."""
        choice = self.tool_choice
        shown = choice.allowed is not None and any(tool == one["function"]["name"] for one in self.tools)
        return choice.mode != "none" and (not shown or tool in (choice.allowed or ()))

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call: those offered, and deferred ones that a tool's result has shown since."""
        loaded = (tool for message in self.messages for tool in message.get(LOADED_TOOLS) or ())
        tools = {tool["function"]["name"]: tool for tool in (*self.tools, *loaded)}
        return tuple(tool for name, tool in tools.items() if self.may_call(name))

    @property
    def prefill(self) -> str | None:
        """The beginning of the answer, if the last message is that: the model continues it."""
        return str(self.messages[-1]["content"]) if self.messages[-1].get(PREFIX) else None


class ToolCall(Struct, frozen=True):
    """A tool that the model calls; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str
    malformed: str | None = None
    """Why the call cannot be parsed, if that showed only after its beginning had been streamed."""

    @property
    def message_part(self) -> dict[str, Any]:
        """The call as a part of a message."""
        function = {"name": self.name, "arguments": self.arguments}
        malformed = {"malformed": self.malformed} if self.malformed is not None else {}
        return {"id": self.id, "type": "function", "function": function, **malformed}


class TokenInfo(Struct, frozen=True):
    """One token of an answer or a prompt, for callers that request logprobs."""

    text: str
    data: bytes
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    top: tuple[tuple[str, bytes, float], ...]
    id: int | None = None
    """None if an upstream generated it."""


class AnswerStarted(Struct, frozen=True):
    """The request is valid and will be answered; errors after this one end a stream that has started."""

    id: str
    """The call's id in the record."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    choice: int = 0
    """The first choice of its prompt, if a request has several prompts."""
    prompt_text: str = ""
    """The text that is continued, for a request with a `prompt`."""


class PromptTokens(Struct, frozen=True):
    """The tokens of a choice's prompt, before its answer; only if the request has `prompt_logprobs`."""

    choice: int
    text: str
    tokens: tuple[TokenInfo, ...]
    offsets: tuple[int, ...]
    """Where each token begins in the text."""


class TextDelta(Struct, frozen=True):
    """The next part of an answer's text."""

    choice: int
    text: str
    tokens: tuple[TokenInfo, ...] = ()


class ReasoningDelta(Struct, frozen=True):
    """The next part of an answer's reasoning."""

    choice: int
    text: str


class ToolCallStarted(Struct, frozen=True):
    """A tool call of an answer begins. Calls begin in the order of their indices."""

    choice: int
    index: int
    id: str
    name: str


class ToolArgumentsDelta(Struct, frozen=True):
    """The next part of a tool call's arguments."""

    choice: int
    index: int
    text: str


class ToolCallFinished(Struct, frozen=True):
    """A tool call is complete; the `ToolArgumentsDelta`s of its index add up to its arguments."""

    choice: int
    index: int
    call: ToolCall


class AnswerFinished(Struct, frozen=True):
    """An answer is complete."""

    choice: int
    id: str
    """The call's id in the record."""
    finish: FinishReason
    stop: str | None
    """The stop string that ended it."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """How many of the completion's tokens are reasoning."""


AnswerEvent = (
    AnswerStarted
    | PromptTokens
    | TextDelta
    | ReasoningDelta
    | ToolCallStarted
    | ToolArgumentsDelta
    | ToolCallFinished
    | AnswerFinished
)
