"""The renderer protocol: what Leyden uses of a model's renderer, be it ours or one of the `renderers` package.

`ChatRenderer` is what every renderer has. The other protocols are optional capabilities; test for them by isinstance.
What renderers return has the attributes of the package's own classes, which are not used here: the package imports the
OpenAI SDK, half of a server's start, and ours for ChatML does not need it.
"""

from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from leyden.rendering.chat_template import TemplateError


class ToolCallStatus(StrEnum):
    """How far a tool call could be read. Compare by ==: the package has an enumeration of its own."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED_BLOCK = "unclosed_block"
    MISSING_NAME = "missing_name"
    MALFORMED_STRUCTURE = "malformed_structure"


class ParsedToolCall(Struct):
    """A tool call of an answer, be it well-formed or not."""

    raw: str
    name: str | None = None
    arguments: Any = None
    token_span: tuple[int, int] | None = None
    """Its tokens in the completion; None if they are not known."""
    status: ToolCallStatus = ToolCallStatus.OK
    id: str | None = None


class ParsedResponse(Struct):
    """A completion as a message."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[ParsedToolCall] = []
    reasoning_complete: bool | None = True
    """False if the completion ends inside its reasoning; None if the renderer cannot know."""


class RenderedTokens(Struct):
    """The tokens of a conversation, each with the index of its message; -1 for none."""

    token_ids: list[int]
    message_indices: list[int]


class ResponseParser(Protocol):
    """Converts completions back to messages."""

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Parse a completion into text, reasoning and tool calls."""


class ChatRenderer(ResponseParser, Protocol):
    """Converts conversations to tokens and completions back to messages, for one model."""

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the tokens of a conversation."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Extend a prompt and its completion by new messages without changing their tokens; None if it cannot."""

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens that end a completion."""


@runtime_checkable
class ToolCallForcer(Protocol):
    """A renderer that can begin an answer that has to be a tool call."""

    def begin_call(self, name: str | None) -> list[int]:
        """Return the first tokens of a call of this tool, or of any tool."""


@runtime_checkable
class AttributingRenderer(Protocol):
    """A renderer that attributes each token to its message."""

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Return the tokens of a conversation, each with the index of its message."""


@runtime_checkable
class ConfigurableRenderer(Protocol):
    """A renderer that can be built again with another configuration."""

    config: Any


def tool_call_texts(renderer: ResponseParser) -> tuple[str, ...]:
    """Return the texts that begin a tool call in a model's answer, if it has no token for that."""
    texts: tuple[str, ...] = getattr(renderer, "tool_call_texts", ())  # a protocol's isinstance is slow for each call
    return texts


def find_reasoning_end(renderer: ChatRenderer) -> int | None:
    """Return the token that ends the reasoning of an answer; None if the renderer writes none or uses no such token.

    Parsers return reasoning that is still open as the model writes it, with white space or a label that they drop when
    it ends. With this token after it, the text is the one that the whole answer will have.
    """
    question: list[Any] = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    try:
        prompt = renderer.render_ids(question, add_generation_prompt=True)
        written = renderer.render_ids([*question, answer])
    except TemplateError:
        return None
    shared = next((at for at, (one, two) in enumerate(zip(prompt, written, strict=False)) if one != two), len(prompt))
    was_open = False
    for end in range(shared, len(written)):
        parsed = renderer.parse_response(written[shared : end + 1], prompt_ids=prompt[:shared])
        if was_open and parsed.reasoning_complete is not False:
            return written[end]
        was_open = parsed.reasoning_complete is False
    return None
