"""A model call from ask to answer: who serves it, whether its rollout may still call, how its tokens are drawn."""

import re
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from leyden.records import EventKind, Purpose, RunSettings, Sampling
from leyden.server.gateway.caller import Caller
from leyden.server.gateway.dialects.types import AnswerEvent, AnswerStarted, GenerationRequest
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.generation import Generation
from leyden.server.gateway.prefix_index import PrefixIndex
from leyden.server.gateway.prompt import make_prompt, offered
from leyden.server.gateway.recorder import AttemptCalls, Recorder
from leyden.server.gateway.served_model import ServedModel
from leyden.server.gateway.upstream.client import UpstreamClient
from leyden.server.gateway.upstream.relay import UPSTREAM, Relay
from leyden.store import queries
from leyden.store.queue import ActiveLease
from leyden.store.store import Store


class Gateway:
    """Answers the model calls of every attempt that is alive."""

    def __init__(
        self, store: Store, policies: Mapping[str, ServedModel], upstream: UpstreamClient | None = None
    ) -> None:
        self.policies = policies
        self.upstream = upstream
        self.recorder = Recorder(store)
        self._store = store
        self._conversations: dict[str, PrefixIndex] = {}
        self._settings: dict[str, RunSettings] = {}
        store.changes.subscribe(self._hear)

    def _hear(self, event: Any) -> None:
        if event.kind is EventKind.ATTEMPT_STARTED:
            self._conversations[event.subject] = PrefixIndex()  # it has said nothing yet: there is nothing to read
        elif event.kind is EventKind.ATTEMPT_ENDED:
            self._conversations.pop(event.subject, None)
            self._forget(event.subject)
        elif event.kind is EventKind.RUN_DELETED:
            self._settings.pop(event.run, None)

    def crowding(self) -> float | None:
        """How many calls wait for an engine for each that it serves, at the most crowded; None where none is open."""
        known = (policy.admission.crowding for policy in self.policies.values())
        return max((crowding for crowding in known if crowding is not None), default=None)

    async def answer(self, caller: Caller, ask: GenerationRequest) -> AsyncGenerator[AnswerEvent, None]:
        """Answer a call, beginning with `AnswerStarted`. A caller that hangs up early leaves an abandoned call."""
        settings = await self._settings_of(caller.live.run)
        policy = self._route(ask.model, settings)
        caller = replace(caller, role=caller.role or _role(ask, settings))
        ledger = AttemptCalls(caller.live, settings, await self._conversation_of(caller.live))
        first = f"call-{secrets.token_hex(8)}"
        if isinstance(policy, UpstreamClient):
            _begin(ledger, ask.n)
            answering = Relay(self.recorder, ledger, caller, ask, first).pass_on(policy)
        else:
            answering = self._draw(policy, ledger, caller, ask, first)
        async with aclosing(answering) as events:
            async for event in events:
                yield event

    async def _draw(
        self, policy: ServedModel, ledger: AttemptCalls, caller: Caller, ask: GenerationRequest, first: str
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Answer a call with tokens of a policy."""
        settings, conversation = ledger.settings, ledger.conversation
        prompt = await make_prompt(policy, conversation, ask, settings.history)
        longest = policy.engine.context_length
        room = longest - len(prompt.ids)
        if room < 1:
            message = f"the prompt has {len(prompt.ids)} tokens, and the model takes {longest} in all"
            raise GatewayError(ErrorKind.TOO_LONG, message, "messages")
        grammar = None
        if ask.format is not None and not prompt.forced:  # what must be a tool call has no other format
            grammar = await policy.formats.grammar(ask.format, prompt.ids, calls=bool(offered(ask)))
        policy.admission.refuse_if_full()
        sampling = _sampling(caller.live, settings, ask.sampling, _begin(ledger, ask.n))
        limits = [room, sampling.max_tokens]
        if settings.max_tokens is not None:
            limits.append(max(1, (settings.max_tokens - conversation.tokens) // ask.n))
        yield AnswerStarted(first, len(prompt.ids), prompt.kept)
        draft = Generation(self.recorder, ledger, caller, policy, ask, prompt, sampling, grammar, first)
        try:
            async with aclosing(draft.write(min(limit for limit in limits if limit is not None))) as events:
                async for event in events:
                    yield event
        finally:
            if caller.live.attempt not in self._conversations:  # it ended meanwhile
                self._forget(caller.live.attempt)

    async def count_tokens(self, caller: Caller, ask: GenerationRequest) -> int:
        """How many tokens the prompt of a call would have."""
        settings = await self._settings_of(caller.live.run)
        policy = self._route(ask.model, settings)
        if isinstance(policy, UpstreamClient):
            raise GatewayError(ErrorKind.NO_MODEL, f"the tokens of {ask.model!r} are not known here", "model")
        return len((await make_prompt(policy, await self._conversation_of(caller.live), ask, settings.history)).ids)

    async def model_names(self, run: str | None) -> list[str]:
        """The names that a run can ask for; with one policy and no routes, any other name will do too."""
        routes = (await self._settings_of(run)).routes if run is not None else {}
        others = await self.upstream.models() if self.upstream is not None and not self.policies else []
        return list(dict.fromkeys([*self.policies, *routes, *others]))

    async def serves(self, model: str, run: str | None) -> bool:
        """Whether a run that asks for this name would be answered."""
        try:
            self._route(model, await self._settings_of(run) if run is not None else RunSettings())
        except GatewayError:
            return False
        return True

    def _route(self, model: str, settings: RunSettings) -> ServedModel | UpstreamClient:
        """Who serves a model name: what the run says; else the policy of that name, the only policy, or upstream."""
        name = settings.routes.get(model, model)
        if name in self.policies:
            return self.policies[name]
        if self.upstream is not None and (name == UPSTREAM or not self.policies):
            return self.upstream
        if len(self.policies) == 1 and not settings.routes:
            return next(iter(self.policies.values()))
        raise GatewayError(
            ErrorKind.NO_MODEL, f"no model {model!r} is served here: name it in the run's routes", "model"
        )

    def _forget(self, attempt: str) -> None:
        for policy in self.policies.values():
            policy.engine.end_session(attempt)

    async def _settings_of(self, run: str) -> RunSettings:
        if run not in self._settings:
            self._settings[run] = (await self._store.read(queries.run, run)).settings
        return self._settings[run]

    async def _conversation_of(self, live: ActiveLease) -> PrefixIndex:
        """What an attempt has said: in memory, or where it began before this server did, from the record."""
        if live.attempt not in self._conversations:
            episode = await self._store.read(queries.episode, live.run, live.attempt)
            self._conversations.setdefault(live.attempt, PrefixIndex.of(episode))
        return self._conversations[live.attempt]


def _role(ask: GenerationRequest, settings: RunSettings) -> str | None:
    """The first role whose rule the system prompt matches."""
    system = "\n".join(message["content"] for message in ask.messages if message["role"] == "system")
    return next((role for role, rule in settings.roles.items() if re.search(rule, system)), None)


def _begin(ledger: AttemptCalls, choices: int) -> int:
    """Begin a call if its rollout may still make one; how many it had begun before. Nothing can come in between."""
    settings, conversation = ledger.settings, ledger.conversation
    if settings.max_calls is not None and conversation.begun + choices > settings.max_calls:
        message = f"this rollout has made {conversation.begun} of its {settings.max_calls} calls (max_calls)"
        raise GatewayError(ErrorKind.SPENT, message)
    if settings.max_tokens is not None and conversation.tokens >= settings.max_tokens:
        raise GatewayError(ErrorKind.SPENT, f"this rollout has sampled its {settings.max_tokens} tokens (max_tokens)")
    return conversation.begin(choices)


def _sampling(live: ActiveLease, settings: RunSettings, asked: Sampling, number: int) -> Sampling:
    """Training samples as the run says, so that a group differs even if its agent asks for temperature 0.

    Evaluation samples as the agent asks; where that leaves the seed open, it is the run's too.
    """
    digest = blake2b(f"{settings.sampling.seed}/{live.rollout}/{number}".encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little") >> 1
    if live.purpose is Purpose.EVAL:
        return replace(asked, seed=seed if asked.seed is None else asked.seed)
    limits = [limit for limit in (settings.sampling.max_tokens, asked.max_tokens) if limit is not None]
    return replace(settings.sampling, max_tokens=min(limits, default=None), stop=asked.stop, seed=seed)
