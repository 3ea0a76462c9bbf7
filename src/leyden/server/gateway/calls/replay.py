"""Answers the first calls of an attempt from the record of another, so that nothing is sampled twice.

A call is recognised by what it asks: its policy and the exact tokens of its prompt, or the whole request if no policy
answers it. So calls that an agent makes at the same time may arrive in any order.
"""

from array import array
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from itertools import islice, takewhile
from operator import eq
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection

from leyden.engine.protocol import TokenChunk
from leyden.episodes import Episode
from leyden.records import Attempt, Call, Sampling
from leyden.server.gateway.dialects.types import GenerationRequest, Message
from leyden.server.gateway.prompts.history import History, meanings
from leyden.server.gateway.prompts.prompt import Prompt
from leyden.store.read import queries

_ALTERNATIVES = "it requests logprobs of other tokens or of the prompt, which are not in the record"
_COMPARED = 16
"""How many recorded requests are compared with one that is not in the record: each may have thousands of messages."""
_SHOWN = 60
"""How many characters of a message are shown from where it differs, and some before."""


class LeftRecord(Struct, frozen=True):
    """A request that the record does not have, and what differs."""

    why: str


class Replay:
    """The calls of a recorded attempt that answer those of another, until all of them have."""

    def __init__(self, recorded: Episode, calls: int, made: Iterable[Call] = ()) -> None:
        """`calls` of the attempt are replayed; those that the other one has `made` before this server started, were."""
        whole = replace(recorded)  # with the prompts of all calls, which are not kept
        self._recorded = recorded
        self._waiting: dict[str, tuple[Call, ...]] = {}
        """By the id of the first, the calls of each request that were not replayed yet."""
        self._by_content: dict[bytes, list[str]] = {}
        self._sampled = False
        self.reports_allowed_mass = any(any(call.allowed or ()) for call in recorded.calls)
        """Whether the engine that sampled the calls could constrain them in a rollout that is trained on."""
        requests: dict[str, list[Call]] = {}
        for call in recorded.calls:
            requests.setdefault(call.parent if call.choice and call.parent else call.id, []).append(call)
        in_reach = {call.id for call in recorded.calls[:calls]}
        for id, answers in requests.items():
            ids = self._by_content.setdefault(_recorded_content(whole, answers), [])
            if id in in_reach and all(map(recorded.stands, answers)):
                self._waiting[id] = tuple(replace(one, origin=one.origin or recorded.attempt.id) for one in answers)
                ids.append(id)
        for call in made:
            self._waiting.pop(call.id, None)
            self._sampled |= call.origin is None

    @property
    def done(self) -> bool:
        """Whether every call was replayed."""
        return not self._waiting

    def take(self, prompt: Prompt, request: GenerationRequest) -> tuple[Call, ...] | LeftRecord:
        """Return the calls that answer a request; empty if it has to be sampled.

        What an agent asks after an answer that was sampled may be new. Before that, something new leaves the record.
        """
        digest = prompt.history.digests[-1]
        known = self._by_content.get(_content(prompt.history.policy, prompt.ids, digest, request.sampling, request.n))
        if known is None:
            return () if self._sampled else LeftRecord(self._difference(prompt.history, request.n))
        waiting = [self._waiting[id] for id in known if id in self._waiting]
        if waiting and (request.top_logprobs or request.prompt_logprobs):
            return LeftRecord(_ALTERNATIVES)
        if not waiting:
            self._sampled = True
            return ()
        calls = next((calls for calls in waiting if calls[0].request == request.request), waiting[0])
        del self._waiting[calls[0].id]
        return calls

    def _difference(self, asked: History, choices: int) -> str:
        """Say how a request differs from the one of the next recorded ones that shares most of its messages."""
        said = meanings(asked.messages)

        def shared(calls: Sequence[Call]) -> int:
            return _common_length(said, meanings(self._recorded.messages(calls[0])))

        closest = max(islice(self._waiting.values(), _COMPARED), key=shared)
        first, at = closest[0], shared(closest)
        recorded = self._recorded.messages(first)
        if at < len(asked.messages) or at < len(recorded):
            return f"message {at + 1} " + _changed(recorded[at:], asked.messages[at:])
        if first.policy != asked.policy:
            return f"it asks {asked.policy}, and the recorded call asked {first.policy}"
        if self._recorded.tools(first) != asked.tools:
            return "it offers other tools"
        if len(closest) != choices:
            return f"it asks for {choices} answers, and the recorded call asked for {len(closest)}"
        return "the same messages and tools are requested with other parameters"


def read_replay(connection: Connection, attempt: Attempt, made: Collection[Call]) -> Replay | None:
    """Read what an attempt that has made these calls is still to replay; None if that is nothing."""
    if attempt.origin is None or attempt.diverged is not None:
        return None
    recorded = queries.get_episode(connection, attempt.run, attempt.origin.attempt)
    replay = Replay(recorded, attempt.origin.calls, made)
    return None if replay.done else replay


def replayed_chunks(call: Call, stop_ids: Collection[int]) -> Iterator[TokenChunk]:
    """Yield the tokens of a recorded call as the engine sent them, by the version that sampled them."""
    start, number = 0, 0
    for run in call.versions:
        part, number = slice(start, start + run.tokens), run.number
        start += run.tokens
        ended = start == len(call.completion_ids) and call.completion_ids[-1] in stop_ids
        yield TokenChunk(
            call.completion_ids[part],
            () if call.logprobs is None else call.logprobs[part],
            number,
            allowed=() if call.allowed is None else call.allowed[part],
            finish="stop" if ended else None,
        )
    yield TokenChunk((), (), number, finish="length" if call.finish == "length" else "stop")


class RecordedAnswers(Struct, frozen=True):
    """The `AnswerSource` of a request that an upstream answered before, with the answers of the record."""

    policy: str
    calls: tuple[Call, ...]

    @asynccontextmanager
    async def chat(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Yield an iterator over one whole completion with the recorded answers."""
        yield self._whole()

    async def _whole(self) -> AsyncIterator[dict[str, Any]]:
        answers = [
            {"index": call.choice, "message": call.response, "finish_reason": call.finish} for call in self.calls
        ]
        yield {"choices": answers, "usage": self.calls[0].usage}


def _recorded_content(episode: Episode, answers: Sequence[Call]) -> bytes:
    call = answers[0]
    ids, digest = episode.prompt_ids(call), b""
    if not ids:
        digest = History.of(episode.messages(call), episode.tools(call), call.policy).digests[-1]
    return _content(call.policy, ids, digest, call.sampling, len(answers))


def _content(policy: str, ids: Sequence[int], history: bytes, sampling: Sampling, choices: int) -> bytes:
    """Return a digest of what a request asks; one without token ids, that no policy answers, by its history."""
    asked = array("I", ids).tobytes() if ids else history + msgspec.msgpack.encode(sampling)
    return blake2b(f"{policy}\n{choices}\n".encode() + asked, digest_size=16).digest()


def _common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items at the beginning are equal."""
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def _changed(recorded: Sequence[Message], asked: Sequence[Message]) -> str:
    """Describe the first of two sequences of messages that differ."""
    if not asked:
        return f"({recorded[0]['role']}) is missing: {_part(_text(recorded[0]), 0)}"
    if not recorded:
        return f"({asked[0]['role']}) is new: {_part(_text(asked[0]), 0)}"
    before, now = _text(recorded[0]), _text(asked[0])
    at = _common_length(before, now)
    return f"({asked[0]['role']}) was {_part(before, at)} and is {_part(now, at)}"


def _text(message: Message) -> str:
    """Return what a message says, as one text."""
    called = [part["function"] for part in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return text + (msgspec.json.encode(called).decode() if called else "")


def _part(text: str, at: int) -> str:
    """Quote a text around a position."""
    start, end = max(0, at - _SHOWN // 3), at + _SHOWN
    return f'"{"…" if start else ""}{text[start:end]}{"…" if end < len(text) else ""}"'
