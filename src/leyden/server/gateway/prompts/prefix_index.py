"""Finds the earlier call of an attempt that a request continues.

A request continues a call when its messages are that call's messages, then its answer as the client sends it back, then
new ones. A client may drop reasoning, and text beside a tool call; the match says so. Of several answers that differ
only in what was dropped, the one whose tool call ids come back is continued, or else the latest. In doubt, nothing is.
"""

import asyncio
from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from leyden.episodes import Episode
from leyden.records import Call, CallStatus, PromptOrigin
from leyden.server.gateway.prompts.history import AnswerDetails, History
from leyden.server.gateway.prompts.text_index import TextIndex

NOT_ANSWERED = "the history is not one that was answered"
_MAX_ALIKE = 64
"""Of calls with the same history and answer, so many of the latest can be continued: each is compared with what comes
back, and an agent may ask the same thousands of times."""


class IndexedCall(Struct, frozen=True):
    """A call that can be continued. Like the record, it holds only the tokens that it adds to its parent."""

    id: str
    parent: "IndexedCall | None"
    kept_ids: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    finish: str
    stop: tuple[str, ...]
    """The stop strings of its request."""
    answers: tuple[AnswerDetails, ...]
    """The details of the answers in its prompt and of its own, as their tokens have them."""

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

    @property
    def total_ids(self) -> int:
        """The number of tokens in prompt and completion."""
        return self.kept_ids + len(self.prompt_ids) + len(self.completion_ids)


class PrefixMatch(Struct, frozen=True):
    """How a request relates to the earlier calls of its attempt."""

    origin: PromptOrigin
    reason: str
    """Why the request continues no call if it looks as if it should, or what its client dropped."""
    call: IndexedCall | None
    """The call that it continues, or that it shares most messages with."""
    shared_messages: int
    """How many messages it shares with that call."""
    answered: bool = False
    """Whether the call's answer is the last of the shared messages."""


class PrefixIndex:
    """The calls of one attempt, with all its branches, sub-agents and retries."""

    def __init__(self) -> None:
        self.started = 0
        self.recorded = 0
        self.texts = TextIndex()
        """The calls that continued a text."""
        self.large_prompts = asyncio.Lock()
        """Held while a large prompt of the attempt is tokenised."""
        self._calls: dict[str, IndexedCall] = {}
        self._by_answered: dict[bytes, deque[IndexedCall]] = {}  # by the essence of the history with the answer
        self._by_prefix: dict[bytes, IndexedCall] = {}  # by every prefix of a history
        self._by_request: dict[bytes, tuple[str, CallStatus]] = {}  # by the whole history, to recognise retries

    @classmethod
    def from_episode(cls, episode: Episode) -> "PrefixIndex":
        """Rebuild the index of an attempt from the record."""
        index = cls()
        for call in episode.calls:
            index.add(call, History.of(episode.messages(call), episode.tools(call), call.policy))
        return index

    def match(self, history: History) -> PrefixMatch:
        """Find the call that a request continues, or the one that it shares the longest prefix with."""
        messages = history.messages
        for length in range(len(messages), 0, -1):
            found = self._answered(history, length)
            if found is None:
                continue
            call, dropped = found
            if not any(message["role"] == "assistant" for message in messages[length:]):
                return PrefixMatch(PromptOrigin.CONTINUED, _why_dropped(dropped), call, length, answered=True)
            reason = f"the history was edited after message {length}"
            return PrefixMatch(PromptOrigin.RERENDERED, reason, call, length, answered=True)
        for length in range(len(messages), 0, -1):
            shared = self._by_prefix.get(history.digests[length])
            if shared is not None:
                break
        else:
            return PrefixMatch(PromptOrigin.FRESH, "", None, 0)
        if any(message["role"] == "assistant" for message in messages):
            return PrefixMatch(PromptOrigin.RERENDERED, NOT_ANSWERED, shared, length)
        return PrefixMatch(PromptOrigin.FRESH, "", shared, length)

    def answered_tokens(self, history: History) -> int | None:
        """Return the number of tokens of a conversation that ends with an answer given here; None for any other."""
        found = self._answered(history, len(history.messages))
        return found[0].total_ids if found is not None else None

    def indexed(self, id: str) -> IndexedCall:
        """Return a recorded call."""
        return self._calls[id]

    def start(self, choices: int) -> int:
        """Count a request that starts; return how many calls had started before it."""
        earlier, self.started = self.started, self.started + choices
        return earlier

    def retried_call(self, history: History, marked: bool) -> str | None:
        """Return the id of the call that a request repeats: the latest with the same messages, tools and policy.

        A request is a retry if its SDK marks it so, or if that call was abandoned or failed.
        """
        id, status = self._by_request.get(history.digests[-1], (None, CallStatus.OK))
        return id if marked or status in (CallStatus.ABANDONED, CallStatus.FAILED) else None

    def add_request(self, call: Call, history: History) -> None:
        """Remember the request of a call that is about to be recorded: its retry may arrive before it is."""
        if not call.choice:
            self._by_request[history.digests[-1]] = call.id, call.status

    def add(self, call: Call, history: History) -> None:
        """Add a recorded call."""
        self.recorded += 1
        self.started = max(self.started, self.recorded)
        parent = self._calls.get(call.parent) if call.parent else None
        answers = self._sampled_answers(call, parent, history)
        ids = (call.kept_ids, call.prompt_ids, call.completion_ids)
        indexed = IndexedCall(call.id, parent, *ids, call.finish, call.sampling.stop, answers)
        self._calls[call.id] = indexed
        self.add_request(call, history)
        for digest in history.digests[1:]:
            self._by_prefix.setdefault(digest, indexed)
        self.texts.add(call, indexed.full_prompt, history.messages)
        if call.status is CallStatus.OK and call.response is not None:
            digest, essential = history.with_answer(call.response)
            self._by_prefix[digest] = indexed
            if call.completion_ids:
                self._by_answered.setdefault(essential, deque(maxlen=_MAX_ALIKE)).append(indexed)

    def _answered(self, history: History, length: int) -> tuple[IndexedCall, frozenset[str]] | None:
        """Find the call whose history and answer are the first messages, and what the client dropped from them.

        Of several that are as like, it is the latest.
        """
        candidates = self._by_answered.get(history.essential_digests[length])
        if candidates is None:
            return None
        given = tuple(history.answers[: history.answers_before(length)])
        best: tuple[tuple[int, int], IndexedCall, frozenset[str]] | None = None
        for call in reversed(candidates):
            if call.answers == given:
                return call, frozenset()
            dropped = list(_dropped(call.answers, given))
            if None in dropped:
                continue
            kept = sum(not parts for parts in dropped)
            same_ids = sum(ours.call_ids == theirs.call_ids for ours, theirs in zip(call.answers, given, strict=True))
            if best is None or (kept, same_ids) > best[0]:
                best = (kept, same_ids), call, frozenset(part for parts in dropped for part in parts or ())
        return best[1:] if best is not None else None

    def _sampled_answers(self, call: Call, parent: IndexedCall | None, history: History) -> tuple[AnswerDetails, ...]:
        """Return the details of the answers in a call's prompt, as its tokens have them, and of its own answer."""
        given = tuple(history.answers[:-1] if history.prefilled else history.answers)
        if parent is not None and call.choice:
            given = parent.answers[: len(given)]
        elif parent is not None and call.kept_ids >= parent.total_ids:
            shared = history.answers_before(call.kept_messages)
            given = parent.answers[:shared] + given[shared:]
        return (*given, AnswerDetails.of(history.whole_answer(call.response))) if call.response is not None else given


def _dropped(sampled: tuple[AnswerDetails, ...], given: tuple[AnswerDetails, ...]) -> Iterator[frozenset[str] | None]:
    for ours, theirs in zip(sampled, given, strict=True):
        yield ours.dropped(theirs)


def _why_dropped(dropped: frozenset[str]) -> str:
    names = {"text": "text beside a tool call", "reasoning": "reasoning"}
    parts = [name for part, name in names.items() if part in dropped]
    return f"the client dropped {' and '.join(parts)}; the prompt keeps it" if parts else ""
