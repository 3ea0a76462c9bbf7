"""Which earlier call does this one continue?

A request continues a call when its messages are that call's messages, then its answer as the client gives it back, then
new ones. An answer is recognised by its meaning (keys in another order, arguments written anew, white space trimmed);
everything else must be equal, since it stands in the prompt as it was first sent. When unsure, nothing is continued.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from leyden.episodes import Episode
from leyden.records import Call, CallStatus, PromptOrigin
from leyden.server.gateway.dialects.types import Message

_encode = msgspec.json.Encoder(order="deterministic").encode


class IndexedCall(Struct, frozen=True):
    """A call that can be continued: like the record, it holds only what it adds to its parent."""

    call: str
    parent: "IndexedCall | None"
    kept_ids: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    finish: str

    def whole_prompt(self) -> list[int]:
        """Every token of its prompt."""
        chain, turn = [self], self.parent
        while turn is not None:
            chain.append(turn)
            turn = turn.parent
        ids: list[int] = []
        for turn in reversed(chain):
            del ids[turn.kept_ids :]
            ids += turn.prompt_ids
            if turn is not self:
                ids += turn.completion_ids
        return ids


class History(Struct, frozen=True):
    """The messages of a request, and a mark for each beginning of them: equal marks, equal meaning."""

    messages: Sequence[Message]
    marks: list[bytes]
    sizes: list[int]
    """How many bytes each beginning takes, about."""

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Any], policy: str) -> "History":
        """Mark a request; it can only continue one that offered the same tools to the same policy."""
        order: dict[str, int] = {}
        marks, sizes = [b""], [0]
        for said in ([policy, tools], *(_meaning(message, order) for message in messages)):
            data = _encode(said)
            marks.append(_digest(marks[-1], data))
            sizes.append(sizes[-1] + len(data))
        return cls(messages, marks[1:], sizes[1:])

    def answered(self, response: Message) -> bytes:
        """The mark of this history with an answer."""
        return _digest(self.marks[-1], _encode(_meaning(response, {})))


class PrefixMatch(Struct, frozen=True):
    """Where a request stands among the calls before it."""

    made: PromptOrigin
    why: str
    turn: IndexedCall | None
    """The call that it continues, or that it shares most with."""
    shared: int
    """How many of its messages that call's history begins with."""


class PrefixIndex:
    """The calls of one attempt. Branches, sub-agents and retries are all in it, each beside the other."""

    def __init__(self) -> None:
        self.begun = 0
        self.calls = 0
        self.tokens = 0
        self._turns: dict[str, IndexedCall] = {}
        self._answered: dict[bytes, IndexedCall] = {}  # by history with the answer
        self._shared: dict[bytes, IndexedCall] = {}  # by every beginning of a history
        self._asked: dict[bytes, str] = {}  # by the whole request: for retries

    @classmethod
    def of(cls, episode: Episode) -> "PrefixIndex":
        """What an attempt has said so far, read back from the record."""
        conversation = cls()
        for call in episode.calls:
            conversation.add(call, History.of(episode.messages(call), episode.tools(call), call.policy))
        return conversation

    def place(self, history: History) -> PrefixMatch:
        """Find where a request belongs."""
        messages, marks = history.messages, history.marks
        for length in range(len(messages) - 1, 0, -1):
            turn = self._answered.get(marks[length])
            if turn is not None and not any(message["role"] == "assistant" for message in messages[length:]):
                return PrefixMatch(PromptOrigin.CONTINUED, "", turn, length)
        for length in range(len(messages), 0, -1):
            turn = self._shared.get(marks[length])
            if turn is not None:
                break
        else:
            return PrefixMatch(PromptOrigin.FRESH, "", None, 0)
        if any(message["role"] == "assistant" for message in messages):
            return PrefixMatch(PromptOrigin.RERENDERED, "the history is not one that was answered", turn, length)
        return PrefixMatch(PromptOrigin.FRESH, "", turn, length)

    def begin(self, choices: int) -> int:
        """Begin a call; how many had begun before it."""
        before, self.begun = self.begun, self.begun + choices
        return before

    def retried(self, history: History) -> str | None:
        """The latest call that asked for just the same."""
        return self._asked.get(history.marks[-1])

    def add(self, call: Call, history: History) -> None:
        """Take up a call that was made."""
        self.calls += 1
        self.begun = max(self.begun, self.calls)
        self.tokens += len(call.completion_ids)
        parent = self._turns.get(call.parent) if call.parent else None
        turn = IndexedCall(call.id, parent, call.kept_ids, call.prompt_ids, call.completion_ids, call.finish)
        self._turns[call.id] = turn
        if not call.choice:
            self._asked[history.marks[-1]] = call.id
        for mark in history.marks[1:]:
            self._shared.setdefault(mark, turn)
        if call.status is CallStatus.OK and call.response is not None:
            mark = history.answered(call.response)
            self._shared[mark] = turn
            if call.completion_ids:
                self._answered[mark] = turn


def _meaning(message: Message, order: dict[str, int]) -> Any:
    """What a message says; `order` carries which tool call of the last answer has which id."""
    match message.get("role"):
        case "assistant":
            calls = message.get("tool_calls") or ()
            order.clear()
            order.update({call["id"]: index for index, call in enumerate(calls)})
            return [
                "assistant",
                (message.get("content") or "").strip(),
                [[call["function"]["name"], _arguments(call["function"]["arguments"])] for call in calls],
            ]
        case "tool":
            answered = message.get("tool_call_id", "")
            return ["tool", order.get(answered, answered), message["content"]]
        case role:
            return [role, message.get("content"), message.get("name")]


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return ["not JSON", text.strip()]


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=16).digest()
