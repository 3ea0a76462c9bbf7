"""The messages of a request, with digests by which they are compared with those of earlier calls.

Answers are compared by meaning: key order, formatting of JSON and of its numbers (`2.0` and `2`), ids of tool calls and
outer white space do not count. All other messages must be equal, since a prompt holds them as they were sent.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from leyden.server.gateway.dialects.types import PREFIX, Message

_encode = msgspec.json.Encoder(order="deterministic").encode
_EXACT_INTEGERS = 2.0**53
_STRUCTURE = (",", "[", "{")
_MAX_VALUES = 250_000
"""Values, about, of all arguments of a request that are compared by meaning, as many as a body may have. Those after
them are compared as text: a request of the largest size could have millions."""


class AnswerDetails(Struct, frozen=True):
    """What clients may drop from an answer or use to identify it. Texts are digests; empty if there is none."""

    text: bytes
    reasoning: bytes
    call_ids: tuple[str, ...]

    @classmethod
    def of(cls, message: Message) -> "AnswerDetails":
        """Compute the details of an assistant's message."""
        calls = message.get("tool_calls") or ()
        return cls(
            _text_digest(message.get("content")),
            _text_digest(message.get("reasoning_content")),
            tuple(call["id"] for call in calls),
        )

    def dropped(self, given: "AnswerDetails") -> frozenset[str] | None:
        """Return what a client dropped that sends this answer back as `given`; None if it is another answer."""
        names = ("text", "reasoning")
        pairs = [(name, getattr(self, name), getattr(given, name)) for name in names]
        if any(theirs not in (b"", ours) for _, ours, theirs in pairs):
            return None
        return frozenset(name for name, ours, theirs in pairs if ours != theirs)


class History(Struct, frozen=True):
    """The messages of a request, with digests of each prefix, by the number of messages in it.

    A request can only continue one that offered the same tools to the same policy, so the digests cover those too.
    """

    messages: Sequence[Message]
    tools: tuple[Any, ...]
    policy: str
    digests: list[bytes]
    """Equal digests mean equal meaning."""
    essential_digests: list[bytes]
    """As `digests`, without what a client may drop from an answer: reasoning, and text beside a tool call."""
    answers: list[AnswerDetails]
    """The details of the assistant's messages."""
    sizes: list[int]
    """The approximate bytes of each prefix, without what templates may drop."""
    whole_sizes: list[int]
    """The approximate bytes of each prefix that a template may write: with reasoning and the ids of tool calls."""

    @classmethod
    def of(cls, messages: Sequence[Message], tools: tuple[Any, ...], policy: str) -> "History":
        """Compute the digests of a request's messages."""
        conversation = _Conversation()
        first = _encode([policy, tools])
        digests, sizes, whole_sizes = [_digest(b"", first)], [len(first)], [len(first)]
        essential = list(digests)
        answers = []
        for message in messages:
            data, core = _meaning(message, conversation)
            digests.append(_digest(digests[-1], data))
            essential.append(_digest(essential[-1], core))
            sizes.append(sizes[-1] + len(data))
            whole_sizes.append(whole_sizes[-1] + len(data) + _droppable_size(message))
            if message.get("role") == "assistant":
                answers.append(AnswerDetails.of(message))
        return cls(messages, tools, policy, digests, essential, answers, sizes, whole_sizes)

    @property
    def prefilled(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return bool(self.messages) and self.messages[-1].get(PREFIX) is True

    def whole_answer(self, response: Message) -> Message:
        """Return an answer with the beginning that the request gave it."""
        return (
            {**response, "content": self.messages[-1]["content"] + response["content"]} if self.prefilled else response
        )

    def with_answer(self, response: Message) -> tuple[bytes, bytes]:
        """Return the two digests of this history followed by an answer."""
        data, core = _meaning(self.whole_answer(response), _Conversation())
        before = -2 if self.prefilled else -1
        return _digest(self.digests[before], data), _digest(self.essential_digests[before], core)

    def answers_before(self, length: int) -> int:
        """Return how many of the first messages are the assistant's."""
        return sum(message.get("role") == "assistant" for message in self.messages[:length])


def meanings(messages: Sequence[Message]) -> list[bytes]:
    """Return what each message says, without what a client may drop from an answer; equal bytes mean equal meaning."""
    conversation = _Conversation()
    return [_meaning(message, conversation)[1] for message in messages]


class _Conversation:
    """What the meaning of a message depends on, of those before it."""

    def __init__(self) -> None:
        self.call_order: dict[str, int] = {}
        """The positions of the tool calls of the last answer, by id."""
        self.values = _MAX_VALUES
        """How many more values of arguments are compared by meaning."""


def _droppable_size(message: Message) -> int:
    """Return the size of what a message has and its meaning has not: reasoning, and the ids of tool calls."""
    reasoning = message.get("reasoning_content")
    ids = sum(len(call["id"]) for call in message.get("tool_calls") or ())
    return ids + (len(reasoning) if isinstance(reasoning, str) else 0)


def _meaning(message: Message, conversation: _Conversation) -> tuple[bytes, bytes]:
    """Return what a message says, and that without what may be dropped from an answer."""
    call_order = conversation.call_order
    match message.get("role"):
        case "assistant":
            calls = message.get("tool_calls") or ()
            call_order.clear()
            call_order.update({call["id"]: index for index, call in enumerate(calls)})
            made = [
                [call["function"]["name"], _arguments(call["function"]["arguments"], conversation)] for call in calls
            ]
            text = (message.get("content") or "").strip()
            # of reasoning only a digest: templates may drop it, so it does not count for the size of a request
            reasoning = _text_digest(message.get("reasoning_content")).hex()
            return _encode(["assistant", text, reasoning, made]), _encode(["assistant", "" if made else text, made])
        case "tool":
            call_id = message.get("tool_call_id", "")
            data = _encode(["tool", call_order.get(call_id, call_id), message["content"]])
        case role:
            data = _encode([role, message.get("content"), message.get("name")])
    return data, data


def _arguments(text: str, conversation: _Conversation) -> Any:
    conversation.values -= sum(map(text.count, _STRUCTURE))
    if conversation.values < 0:
        return ["too large", text.strip()]
    try:
        return _with_plain_numbers(msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError, OverflowError):
        return ["not JSON", text.strip()]


def _with_plain_numbers(value: Any) -> Any:
    """Write numbers as JavaScript does, which does not distinguish 2 from 2.0 and has no integers above 2**53."""
    match value:
        case bool():
            return value
        case int() | float():
            number = float(value)
            return int(number) if number.is_integer() and abs(number) <= _EXACT_INTEGERS else number
        case list():
            return [_with_plain_numbers(item) for item in value]
        case dict():
            return {key: _with_plain_numbers(item) for key, item in value.items()}
    return value


def _text_digest(text: Any) -> bytes:
    text = text.strip() if isinstance(text, str) else ""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() if text else b""


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=16).digest()
