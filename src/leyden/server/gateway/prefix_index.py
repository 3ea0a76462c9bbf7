"""Finds the earlier call of an attempt that a request continues.

A request continues a call when its messages are that call's messages, then its answer as the client sends it back, then
new ones. Answers are compared by meaning (key order, JSON formatting of arguments and outer white space do not count);
all other messages must be equal, since the prompt holds them as they were first sent. In doubt, nothing is continued.
"""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from leyden.episodes import Episode
from leyden.records import Call, CallStatus, PromptOrigin
from leyden.server.gateway.dialects.types import Message
from leyden.server.gateway.text_index import TextIndex

_encode = msgspec.json.Encoder(order="deterministic").encode


class IndexedCall(Struct, frozen=True):
    """A call that can be continued. Like the record, it holds only what it adds to its parent."""

    id: str
    parent: "IndexedCall | None"
    kept_ids: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    finish: str

    def full_prompt(self) -> list[int]:
        """Return every token of the prompt."""
        chain, call = [self], self.parent
        while call is not None:
            chain.append(call)
            call = call.parent
        ids: list[int] = []
        for call in reversed(chain):
            del ids[call.kept_ids :]
            ids += call.prompt_ids
            if call is not self:
                ids += call.completion_ids
        return ids


class History(Struct, frozen=True):
    """The messages of a request with a digest of each prefix: equal digests mean equal meaning.

    A request can only continue one that offered the same tools to the same policy, so the digests cover those too.
    """

    messages: Sequence[Message]
    tools: tuple[Any, ...]
    policy: str
    digests: list[bytes]
    """By the number of messages in the prefix."""
    sizes: list[int]
    """The approximate bytes of each prefix."""

    @classmethod
    def of(cls, messages: Sequence[Message], tools: tuple[Any, ...], policy: str) -> "History":
        """Compute the digests of a request's messages."""
        call_order: dict[str, int] = {}
        digests, sizes = [b""], [0]
        for part in ([policy, tools], *(_meaning(message, call_order) for message in messages)):
            data = _encode(part)
            digests.append(_digest(digests[-1], data))
            sizes.append(sizes[-1] + len(data))
        return cls(messages, tools, policy, digests[1:], sizes[1:])

    def digest_with(self, response: Message) -> bytes:
        """Return the digest of this history followed by an answer."""
        return _digest(self.digests[-1], _encode(_meaning(response, {})))


class PrefixMatch(Struct, frozen=True):
    """How a request relates to the earlier calls of its attempt."""

    origin: PromptOrigin
    reason: str
    """Why the request continues no call, where it looks as if it should."""
    call: IndexedCall | None
    """The call that it continues, or that it shares most messages with."""
    shared_messages: int
    """How many messages it shares with that call."""


class PrefixIndex:
    """The calls of one attempt, with all its branches, sub-agents and retries."""

    def __init__(self) -> None:
        self.started = 0
        self.recorded = 0
        self.sampled_tokens = 0
        self.texts = TextIndex()
        """The calls that continued a text."""
        self.large_prompts = asyncio.Lock()
        """Held while a large prompt of the attempt is tokenised."""
        self._calls: dict[str, IndexedCall] = {}
        self._by_answered: dict[bytes, IndexedCall] = {}  # by the history with the answer
        self._by_prefix: dict[bytes, IndexedCall] = {}  # by every prefix of a history
        self._by_request: dict[bytes, str] = {}  # by the whole history, to recognise retries

    @classmethod
    def from_episode(cls, episode: Episode) -> "PrefixIndex":
        """Rebuild the index of an attempt from the record."""
        index = cls()
        for call in episode.calls:
            index.add(call, History.of(episode.messages(call), episode.tools(call), call.policy))
        return index

    def match(self, history: History) -> PrefixMatch:
        """Find the call that a request continues, or the one that it shares the longest prefix with."""
        messages, digests = history.messages, history.digests
        for length in range(len(messages) - 1, 0, -1):
            call = self._by_answered.get(digests[length])
            if call is not None and not any(message["role"] == "assistant" for message in messages[length:]):
                return PrefixMatch(PromptOrigin.CONTINUED, "", call, length)
        for length in range(len(messages), 0, -1):
            call = self._by_prefix.get(digests[length])
            if call is not None:
                break
        else:
            return PrefixMatch(PromptOrigin.FRESH, "", None, 0)
        if any(message["role"] == "assistant" for message in messages):
            return PrefixMatch(PromptOrigin.RERENDERED, "the history is not one that was answered", call, length)
        return PrefixMatch(PromptOrigin.FRESH, "", call, length)

    def indexed(self, id: str) -> IndexedCall:
        """Return a recorded call."""
        return self._calls[id]

    def start(self, choices: int) -> int:
        """Count a request that starts; return how many calls had started before it."""
        earlier, self.started = self.started, self.started + choices
        return earlier

    def same_request(self, history: History) -> str | None:
        """Return the id of the latest call with the same messages, tools and policy."""
        return self._by_request.get(history.digests[-1])

    def add(self, call: Call, history: History) -> None:
        """Add a recorded call."""
        self.recorded += 1
        self.started = max(self.started, self.recorded)
        self.sampled_tokens += len(call.completion_ids)
        parent = self._calls.get(call.parent) if call.parent else None
        indexed = IndexedCall(call.id, parent, call.kept_ids, call.prompt_ids, call.completion_ids, call.finish)
        self._calls[call.id] = indexed
        if not call.choice:
            self._by_request[history.digests[-1]] = call.id
        for digest in history.digests[1:]:
            self._by_prefix.setdefault(digest, indexed)
        self.texts.add(call, indexed.full_prompt, history.messages)
        if call.status is CallStatus.OK and call.response is not None:
            digest = history.digest_with(call.response)
            self._by_prefix[digest] = indexed
            if call.completion_ids:
                self._by_answered[digest] = indexed


def meanings(messages: Sequence[Message]) -> list[bytes]:
    """Return what each message says; equal bytes mean equal meaning."""
    call_order: dict[str, int] = {}
    return [_encode(_meaning(message, call_order)) for message in messages]


def _meaning(message: Message, call_order: dict[str, int]) -> Any:
    """Return what a message says; `call_order` maps the tool call ids of the last answer to their positions."""
    match message.get("role"):
        case "assistant":
            calls = message.get("tool_calls") or ()
            call_order.clear()
            call_order.update({call["id"]: index for index, call in enumerate(calls)})
            return [
                "assistant",
                (message.get("content") or "").strip(),
                [[call["function"]["name"], _arguments(call["function"]["arguments"])] for call in calls],
            ]
        case "tool":
            call_id = message.get("tool_call_id", "")
            return ["tool", call_order.get(call_id, call_id), message["content"]]
        case role:
            return [role, message.get("content"), message.get("name")]


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return ["not JSON", text.strip()]


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=16).digest()
