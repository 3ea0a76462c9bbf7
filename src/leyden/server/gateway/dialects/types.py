"""One model call in no dialect: what was asked, and what comes back as it comes.

Messages are in the form of the OpenAI chat API, normalised: `content` is text, tool calls have ids and JSON arguments.
Every dialect translates to and from this; none of them knows the store or an engine.
"""

from typing import Any, Literal

from msgspec import Struct

from leyden.records import Sampling

FinishReason = Literal["stop", "length", "tool_calls"]
Message = dict[str, Any]
Format = dict[str, Any]
"""What an answer has to be, as the OpenAI chat API says it: `json_object`, or a `json_schema`."""


class ToolChoice(Struct, frozen=True):
    """Whether the model may, must not or must call a tool, and which."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


class GenerationRequest(Struct, frozen=True):
    """A model call as the agent wants it."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    sampling: Sampling = Sampling()
    n: int = 1
    stream: bool = False
    top_logprobs: int | None = None
    """How many alternatives to show for each token; None: not even the token's own logprob."""
    format: Format | None = None
    """None: text of any kind."""
    request: Any = None
    """What else was asked for, as it was asked."""


class ToolCall(Struct, frozen=True):
    """A tool that the model calls; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class TokenInfo(Struct, frozen=True):
    """One token of an answer, for callers who asked for logprobs."""

    text: str
    data: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...]


class AnswerStarted(Struct, frozen=True):
    """The call is sound and will be answered; from here on its caller can be kept waiting."""

    id: str
    """The call's id in the record."""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class TextDelta(Struct, frozen=True):
    """More of an answer's text."""

    choice: int
    text: str
    tokens: tuple[TokenInfo, ...] = ()


class ReasoningDelta(Struct, frozen=True):
    """More of an answer's reasoning."""

    choice: int
    text: str


class ToolCallDelta(Struct, frozen=True):
    """A tool call of an answer, whole."""

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


AnswerEvent = AnswerStarted | TextDelta | ReasoningDelta | ToolCallDelta | AnswerFinished
