"""A model call from ask to record: its place in the conversation, its prompt, the engine's tokens, and a durable `Call`
before the last byte of the answer leaves.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from leyden.engine import Engine, EngineError, Generate
from leyden.records import Call, CallStatus, Made, Purpose, RunSettings, Sampling
from leyden.server.gateway.admission import Admission
from leyden.server.gateway.ask import Ask, Begun, Done, Event, FinishReason
from leyden.server.gateway.conversation import Conversation, Place
from leyden.server.gateway.errors import GatewayError, Trouble
from leyden.server.gateway.relay import UPSTREAM, relay
from leyden.server.gateway.upstream import Upstream
from leyden.server.gateway.writing import Tokenizer, Writing
from leyden.server.store import Conflict, Live, NotFound, Store, reading


class Policy(Struct, frozen=True):
    """A model that is served here: its engine, and how messages become its tokens and back."""

    name: str
    engine: Engine
    renderer: Any
    tokenizer: Tokenizer
    admission: Admission


class Caller(Struct, frozen=True):
    """Who asks: an attempt, and in which role."""

    live: Live
    role: str | None = None
    retry: bool = False
    """Whether its SDK says that it is trying the same again."""


class _Prompt(Struct, frozen=True):
    place: Place
    made: Made
    why: str
    ids: list[int]
    kept: int
    forced: tuple[int, ...] = ()
    """The last of the ids: the beginning of an answer that must be a tool call."""


class Gateway:
    """Answers the model calls of every attempt that is alive."""

    def __init__(self, store: Store, policies: Mapping[str, Policy], upstream: Upstream | None = None) -> None:
        self.policies = policies
        self.upstream = upstream
        self._store = store
        self._conversations: dict[str, Conversation] = {}
        self._settings: dict[str, RunSettings] = {}
        store.changes.subscribe(self._hear)

    def _hear(self, event: Any) -> None:
        if event.kind == "attempt.ended":
            self._conversations.pop(event.subject, None)
        elif event.kind == "run.deleted":
            self._settings.pop(event.run, None)

    async def answer(self, caller: Caller, ask: Ask) -> AsyncGenerator[Event, None]:
        """Answer a call, beginning with `Begun`. Whoever stops listening early abandons it, which is recorded too."""
        settings = await self._settings_of(caller.live.run)
        policy = self._route(ask.model, settings)
        conversation = await self._conversation_of(caller.live)
        _within_budget(conversation, settings)
        first = f"call-{secrets.token_hex(8)}"
        if isinstance(policy, Upstream):
            yield Begun(first)
            relayed = relay(self._store, conversation, caller.live, caller.role, policy, ask, first)
            async with aclosing(relayed) as events:
                async for event in events:
                    yield event
            return
        prompt = _prompt(policy, conversation, ask)
        sampling = _sampling(caller.live, settings, ask.sampling, conversation.calls)
        room = policy.engine.context - len(prompt.ids)
        if room < 1:
            message = f"the prompt has {len(prompt.ids)} tokens, and the model takes {policy.engine.context} in all"
            raise GatewayError(Trouble.TOO_LONG, message, "messages")
        yield Begun(first)
        draft = _Draft(self._store, conversation, caller, policy, ask, prompt, sampling, first)
        async with aclosing(draft.write(min(room, sampling.max_tokens or room))) as events:
            async for event in events:
                yield event

    async def count(self, caller: Caller, ask: Ask) -> int:
        """How many tokens the prompt of a call would have."""
        policy = self._route(ask.model, await self._settings_of(caller.live.run))
        if isinstance(policy, Upstream):
            raise GatewayError(Trouble.NO_MODEL, f"the tokens of {ask.model!r} are not known here", "model")
        return len(_prompt(policy, await self._conversation_of(caller.live), ask).ids)

    def _route(self, model: str, settings: RunSettings) -> Policy | Upstream:
        """Who serves a model name: what the run says; else the policy of that name, the only policy, or upstream."""
        name = settings.routes.get(model, model)
        if name in self.policies:
            return self.policies[name]
        if self.upstream is not None and (name == UPSTREAM or not self.policies):
            return self.upstream
        if len(self.policies) == 1 and not settings.routes:
            return next(iter(self.policies.values()))
        raise GatewayError(Trouble.NO_MODEL, f"no model {model!r} is served here: name it in the run's routes", "model")

    async def _settings_of(self, run: str) -> RunSettings:
        if run not in self._settings:
            self._settings[run] = (await self._store.read(reading.run, run)).settings
        return self._settings[run]

    async def _conversation_of(self, live: Live) -> Conversation:
        """What an attempt has said: in memory, or after a restart from the record."""
        if live.attempt not in self._conversations:
            episode = await self._store.read(reading.episode, live.run, live.attempt)
            self._conversations.setdefault(live.attempt, Conversation.of(episode))
        return self._conversations[live.attempt]


class _Draft:
    """The answers to one ask (`n` of them) until they are in the record."""

    def __init__(
        self,
        store: Store,
        conversation: Conversation,
        caller: Caller,
        policy: Policy,
        ask: Ask,
        prompt: _Prompt,
        sampling: Sampling,
        first: str,
    ) -> None:
        self._store, self._conversation, self._caller = store, conversation, caller
        self._policy, self._ask, self._prompt = policy, ask, prompt
        self._sampling = sampling
        self._ids = [first, *(f"{first}-{choice}" for choice in range(1, ask.n))]
        self._began = time.time()
        self._writings = [
            Writing(
                choice,
                policy.renderer,
                policy.tokenizer,
                prompt.ids[: len(prompt.ids) - len(prompt.forced)],
                forced=prompt.forced,
                tools=_offered(ask),
                stop=sampling.stop,
                logprobs=ask.top_logprobs is not None,
            )
            for choice in range(ask.n)
        ]

    async def write(self, max_tokens: int) -> AsyncGenerator[Event, None]:
        """Have the engine write the answers; each is recorded before it is said to be done."""
        try:
            async with self._policy.admission.admit(self._caller.live.rollout):
                for choice, writing in enumerate(self._writings):
                    async for event in self._write_one(choice, writing, max_tokens):
                        yield event
            await self._record(CallStatus.OK)
        except (GeneratorExit, asyncio.CancelledError):
            await asyncio.shield(asyncio.create_task(self._record(CallStatus.ABANDONED)))
            raise
        except EngineError as error:
            await self._record(CallStatus.FAILED)
            raise GatewayError(Trouble.FAILED, f"the engine failed: {error}") from error
        for choice, writing in enumerate(self._writings):
            yield Done(
                choice=choice,
                id=self._ids[choice],
                finish=_finish(writing),
                stop=writing.stopped_by,
                prompt_tokens=len(self._prompt.ids),
                completion_tokens=len(writing.ids),
                cached_tokens=self._prompt.kept,
            )

    async def _write_one(self, choice: int, writing: Writing, max_tokens: int) -> AsyncGenerator[Event, None]:
        request = Generate(
            prompt_ids=tuple(self._prompt.ids),
            sampling=replace(self._sampling, seed=_seed(self._sampling.seed, choice)),
            stop_ids=tuple(self._policy.renderer.get_stop_token_ids()),
            max_tokens=max_tokens,
            session=self._caller.live.attempt,
            top_logprobs=self._ask.top_logprobs or 0,
        )
        async with aclosing(self._policy.engine.generate(request)) as pieces:
            async for piece in pieces:
                for event in writing.take(piece):
                    yield event
                if writing.done:
                    return

    async def _record(self, status: CallStatus) -> None:
        """Write every answer into the record, the first with the prompt, the others as its further choices."""
        calls = [self._call(choice, writing, status) for choice, writing in enumerate(self._writings)]
        live = self._caller.live
        try:
            await self._store.record_calls(live.run, live.attempt, calls)
        except (Conflict, NotFound) as over:
            raise GatewayError(Trouble.FORBIDDEN, str(over)) from over
        for call in calls:
            self._conversation.add(call, self._ask.messages, _offered(self._ask))

    def _call(self, choice: int, writing: Writing, status: CallStatus) -> Call:
        prompt, ask, turn = self._prompt, self._ask, self._prompt.place.turn
        complete = len(writing.logprobs) == len(writing.ids)
        shared = prompt.place.shared if turn is not None else 0
        retry = self._caller.retry and self._conversation.retried(ask.messages, _offered(ask), self._policy.name)
        own: dict[str, Any] = {
            "parent": turn.call if turn is not None else None,
            "kept_ids": prompt.kept,
            "kept_messages": shared,
            "prompt_ids": tuple(prompt.ids[prompt.kept :]),
            "messages": ask.messages[shared:],
            "tools": _offered(ask),
            "retry_of": retry or None,
            "request": ask.request,
        }
        if choice:
            own = {"parent": self._ids[0], "kept_ids": len(prompt.ids), "kept_messages": len(ask.messages)}
        return Call(
            id=self._ids[choice],
            choice=choice,
            policy=self._policy.name,
            role=self._caller.role,
            made=prompt.made,
            made_why=prompt.why,
            status=status,
            finish=_finish(writing) if status is CallStatus.OK else str(status),
            completion_ids=tuple(writing.ids),
            logprobs=tuple(writing.logprobs) if complete else None,
            versions=writing.versions,
            sampling=self._sampling,
            response=writing.message,
            started=self._began,
            ended=time.time(),
            **own,
        )


def _prompt(policy: Policy, conversation: Conversation, ask: Ask) -> _Prompt:
    """The prompt of a call, with the beginning of the answer where that is not left to the model."""
    prompt = _unforced_prompt(policy, conversation, ask)
    if ask.tool_choice.mode != "required":
        return prompt
    force = getattr(policy.renderer, "begin_call", None)
    if force is None:
        raise GatewayError(Trouble.INVALID, "this model cannot be made to call a tool: leave it at auto", "tool_choice")
    forced = tuple(force(ask.tool_choice.name))
    return replace(prompt, ids=[*prompt.ids, *forced], forced=forced)


def _unforced_prompt(policy: Policy, conversation: Conversation, ask: Ask) -> _Prompt:
    """What was sampled before stays as it was, token for token, wherever that can be proven."""
    tools = list(_offered(ask)) or None
    place = conversation.place(ask.messages, _offered(ask), policy.name)
    made, why = place.made, place.why
    if made is Made.CONTINUED and place.turn is not None:
        before, completion = place.turn.whole_prompt(), list(place.turn.completion_ids)
        bridged = policy.renderer.bridge_to_next_turn(
            before, completion, list(ask.messages[place.shared :]), tools=tools
        )
        if bridged is not None and bridged.token_ids[: len(before) + len(completion)] == before + completion:
            return _Prompt(place, made, why, bridged.token_ids, len(before) + len(completion))
        made, why = Made.RERENDERED, "the model's template does not extend this turn"
    ids = list(policy.renderer.render_ids(list(ask.messages), tools=tools, add_generation_prompt=True))
    kept = 0
    if place.turn is not None:
        earlier = [*place.turn.whole_prompt(), *place.turn.completion_ids]
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, ids, strict=False)))
    return _Prompt(place, made, why, ids, kept)


def _offered(ask: Ask) -> tuple[Any, ...]:
    return () if ask.tool_choice.mode == "none" else ask.tools


def _within_budget(conversation: Conversation, settings: RunSettings) -> None:
    if settings.max_calls is not None and conversation.calls >= settings.max_calls:
        raise GatewayError(Trouble.SPENT, f"this rollout has made its {settings.max_calls} calls (max_calls)")
    if settings.max_tokens is not None and conversation.tokens >= settings.max_tokens:
        raise GatewayError(Trouble.SPENT, f"this rollout has sampled its {settings.max_tokens} tokens (max_tokens)")


def _sampling(live: Live, settings: RunSettings, asked: Sampling, number: int) -> Sampling:
    """Training samples as the run says, so that a group differs even if its agent asks for temperature 0."""
    if live.purpose is not Purpose.TRAIN:
        return asked
    limits = [limit for limit in (settings.sampling.max_tokens, asked.max_tokens) if limit is not None]
    seed = blake2b(f"{live.run}/{live.rollout}/{number}".encode(), digest_size=4).digest()
    return replace(
        settings.sampling,
        max_tokens=min(limits, default=None),
        stop=asked.stop,
        seed=int.from_bytes(seed, "little") >> 1,
    )


def _seed(seed: int | None, choice: int) -> int | None:
    return seed if seed is None or not choice else (seed + choice) % 2**31


def _finish(writing: Writing) -> FinishReason:
    if writing.calls:
        return "tool_calls"
    return "length" if writing.finish == "length" and writing.stopped_by is None else "stop"
