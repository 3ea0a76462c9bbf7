"""Answers model calls: routes each to a served model, the upstream or a fixed answer; sets its budget and sampling."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from msgspec.structs import replace

from leyden.api.wire import CallTimes, FinishRequest
from leyden.episodes import chain_messages
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Attempt, Call, Event, EventKind, FixedAnswer, Purpose, RunSettings, Sampling
from leyden.server.control.keys import ActiveLeases
from leyden.server.gateway.answers.generation import Generation
from leyden.server.gateway.calls.attempt_calls import AttemptCalls
from leyden.server.gateway.calls.call_pacer import CallPacer
from leyden.server.gateway.calls.caller import Caller
from leyden.server.gateway.calls.recorder import PreparedCall, Recorder
from leyden.server.gateway.calls.replay import LeftRecord, RecordedAnswers, read_replay
from leyden.server.gateway.calls.run_rules import role_by_prompt, route_target
from leyden.server.gateway.dialects.base import StoredAnswer
from leyden.server.gateway.dialects.left_out import LEFT_OUT
from leyden.server.gateway.dialects.types import AnswerEvent, AnswerStarted, GenerationRequest
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prompts.prompt import Prompt, build_prompt, count_tokens
from leyden.server.gateway.prompts.reasoning_tokens import count_reasoning_tokens
from leyden.server.gateway.prompts.text_index import joined
from leyden.server.gateway.prompts.text_prompt import build_text_prompt
from leyden.server.gateway.prompts.truncation import build_fitting_prompt
from leyden.server.gateway.served_model import ServedModel
from leyden.server.gateway.upstream.relay import AnswerSource, FixedAnswerSource, Relay, relayed_prompt
from leyden.store.read import queries
from leyden.store.store import Store

if TYPE_CHECKING:
    from leyden.server.gateway.upstream.client import UpstreamClient

_log = logging.getLogger("leyden.server")
_OWN_ENDINGS = frozenset({Ending.SUCCEEDED, Ending.TIMEOUT, Ending.AGENT_ERROR})
"""Endings that count as the agent's own."""


class Gateway:
    """Answers the model calls of all attempts with an active lease."""

    def __init__(
        self,
        store: Store,
        leases: ActiveLeases,
        models: Mapping[str, ServedModel],
        upstream: "UpstreamClient | None" = None,
    ) -> None:
        self.models = models
        """The served models by policy name."""
        self.upstream = upstream
        self.recorder = Recorder(store)
        self.times: defaultdict[str, CallTimes] = defaultdict(CallTimes)
        """Where the time of each run's calls went."""
        self._store, self._leases = store, leases
        self._pacer = CallPacer()
        self._attempts: dict[str, AttemptCalls] = {}
        """The active attempts that have called a model."""
        self._reading: dict[str, asyncio.Task[AttemptCalls]] = {}
        """Those that are being read from the record."""
        self._started: dict[str, tuple[Purpose, int | None]] = {}
        """Purpose and step of the active attempts that started after this server, which have no calls in the store."""
        self._settings: dict[str, RunSettings] = {}
        self._told: defaultdict[str, set[str]] = defaultdict(set)
        """What the log says of each run that has no effect."""
        store.notifications.subscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.ATTEMPT_STARTED:
            self._started[event.subject] = Purpose(event.data["purpose"]), event.data["step"]
        elif event.kind is EventKind.ATTEMPT_ENDED:
            self._started.pop(event.subject, None)
            self._attempts.pop(event.subject, None)
            self._end_sessions(event.subject)
        elif event.kind is EventKind.RUN_DELETED:
            self._settings.pop(event.run, None)
            self._told.pop(event.run, None)
            self.times.pop(event.run, None)

    async def close(self) -> None:
        """Close the connections to the upstream, and end what runs beside the calls."""
        await self.recorder.strict.close()
        if self.upstream is not None:
            await self.upstream.close()

    def queue_pressure(self) -> float | None:
        """Return the waiting calls per slot of the most loaded model; None if every model is on hold."""
        known = (model.scheduler.queue_pressure for model in self.models.values())
        return max((pressure for pressure in known if pressure is not None), default=None)

    async def answer(self, caller: Caller, request: GenerationRequest) -> AsyncGenerator[AnswerEvent, None]:
        """Answer a call; the first event is `AnswerStarted`. A caller that disconnects leaves an abandoned call."""
        started = time.perf_counter()
        await self._pacer.turn()
        attempt = await self._calls_by(caller)
        caller = replace(caller, role=_role(caller, request, attempt.settings))
        target = self._route(request.model, attempt.settings, caller.role)
        self._tell_ignored(caller, request.ignored)
        if any(LEFT_OUT in message for message in request.messages):
            self._tell_ignored(caller, ("pictures or files in tools' results",))
        if isinstance(target, ServedModel):
            answering = self._generate(target, attempt, caller, request)
        else:
            answering = self._relay(target, attempt, caller, request)
        try:
            with attempt.catching_failure():
                async with aclosing(answering) as events:
                    async for event in events:
                        yield event
        finally:
            attempt.times.total_s += time.perf_counter() - started

    async def start_unrecorded(self, caller: Caller) -> AbstractContextManager[None]:
        """Start a call that is not recorded, if the rollout's limits allow it; return a context that lasts as long.

        It counts for the limits and for how the attempt ends, as others do; a restarted server has not counted it.
        """
        attempt = await self._calls_by(caller)
        attempt.start(1)
        return attempt.unrecorded()

    async def _relay(
        self, source: AnswerSource, attempt: AttemptCalls, caller: Caller, request: GenerationRequest
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Answer a call with the upstream or a fixed answer."""
        prompt = relayed_prompt(attempt.index, request, source.policy)
        replayed = await self._take_replayed(attempt, prompt, request)
        source = RecordedAnswers(source.policy, replayed) if replayed else source
        call = PreparedCall(attempt, caller, request, prompt, request.sampling, replayed)
        relay = Relay(self.recorder, call, source)
        attempt.start(request.n, replayed=bool(replayed))
        async with aclosing(relay.run()) as events:
            async for event in events:
                yield event

    async def _take_replayed(
        self, attempt: AttemptCalls, prompt: Prompt, request: GenerationRequest
    ) -> tuple[Call, ...]:
        """Return the recorded calls that answer a request; none if it has to be sampled."""
        if attempt.replay is None:
            return ()
        found = attempt.replay.take(prompt, request)
        if isinstance(found, LeftRecord):
            await self.recorder.diverge(attempt, found.why)
            return ()
        if attempt.replay.done:
            attempt.replay = None
        return found

    async def _generate(
        self, model: ServedModel, attempt: AttemptCalls, caller: Caller, request: GenerationRequest
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Answer a call with a served model."""
        settings, index = attempt.settings, attempt.index
        switched = _with_reasoning(model, settings, request)
        if switched is model and request.reasoning is False and model.reasoning_end is not None:
            self._tell_ignored(caller, ("reasoning switched off (the model's template has no switch)",))
        model = switched
        # Without the allowed mass, calls under a grammar give no gradient: training rollouts leave them free.
        sampler = model.engine if attempt.replay is None else attempt.replay
        free = attempt.purpose is Purpose.TRAIN and not sampler.reports_allowed_mass
        constrains_calls = not free and model.structured_output.can_constrain_calls
        context_length = model.engine.context_length
        build = partial(build_prompt, model, index, history_mode=settings.history, begin_call=not constrains_calls)
        if request.prompt is not None:
            prompt = await build_text_prompt(model, index, request.prompt)
        elif request.truncates:
            request, prompt = await build_fitting_prompt(request, context_length, build)
        else:
            prompt = await build(request)
        room = context_length - len(prompt.ids)
        if room < (0 if request.sampling.max_tokens == 0 else 1):
            message = f"the prompt has {len(prompt.ids)} tokens, and the model takes {context_length} in all"
            raise GatewayError(ErrorKind.TOO_LONG, message, "messages" if request.prompt is None else "prompt")
        grammar = await _grammar(model, request, prompt, caller.attempt.id, constrains_calls)
        replayed = await self._take_replayed(attempt, prompt, request)
        if not replayed:
            model.scheduler.refuse_if_full()
        number = attempt.start(request.n, replayed=bool(replayed))
        sampling = replayed[0].sampling if replayed else _sampling(attempt, request.sampling, number)
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        budget = settings.max_tokens and max(1, (settings.max_tokens - attempt.sampled_tokens) // request.n)
        call = PreparedCall(attempt, caller, request, prompt, sampling, replayed)
        generation = Generation(self.recorder, call, model, grammar)
        try:
            with attempt.running(generation):
                text = "" if request.prompt is None else joined(prompt.history.messages)
                yield AnswerStarted(generation.id, len(prompt.ids), prompt.kept, prompt_text=text)
                async with aclosing(generation.run(max_tokens, None if replayed else budget)) as events:
                    async for event in events:
                        yield event
        finally:
            if caller.attempt.id not in self._attempts:  # it ended during the call
                self._end_sessions(caller.attempt.id)

    async def time_out(self, attempt: Attempt, ran_s: float, limit_s: float) -> float:
        """Return how much of its time limit an attempt has left that has run for so long; if none, cut its calls.

        The time that its calls waited for the infrastructure is not charged.
        """
        calls = await self._calls_of(attempt)
        left_s = limit_s + calls.waited_s - ran_s
        if left_s > 0:
            return left_s
        await calls.cut(f"this rollout has used its {limit_s:g} s (time_limit_s)")
        return 0.0

    async def end_attempt(self, run: str, attempt: str, report: FinishRequest) -> FinishRequest:
        """Decide how an attempt ends from what its worker reports; cut its calls in flight if it reached a limit.

        An agent error is an engine error if the infrastructure failed a call and none was answered afterwards: most
        agents do not say why they fail. One that fails for a reason of its own at that point is retried too. If
        calls were refused after a crash of the engine, an agent could not do its work, even if it reports a success.
        """
        calls = self._attempts.get(attempt)
        if calls is None or calls.attempt.run != run:
            return report
        if report.outcome.ending is Ending.TIMEOUT or calls.limit_reached:
            await calls.cut("this rollout has ended")
        reason = calls.failure if report.outcome.ending is Ending.AGENT_ERROR else None
        if report.outcome.ending in _OWN_ENDINGS:
            reason = calls.refusal or reason
        if reason is not None:
            outcome = Outcome(Ending.ENGINE_ERROR, f"{reason}\n{report.outcome.message}".rstrip())
            report = replace(report, outcome=outcome, rewards=(), awaits_group=False)
        if report.outcome.ending is Ending.ENGINE_ERROR and calls.engine_crashes == 1:
            report = replace(report, retry=Retry.FREE_ONCE)  # it is one of many that were in flight
        return report

    async def count_tokens(self, caller: Caller, request: GenerationRequest) -> int:
        """Return the number of tokens in the prompt of a call."""
        attempt = await self._calls_by(caller)
        target = self._route(request.model, attempt.settings, _role(caller, request, attempt.settings))
        if not isinstance(target, ServedModel):
            message = f"{request.model!r} is not served by a policy: its tokens cannot be counted here"
            raise GatewayError(ErrorKind.NO_MODEL, message, "model")
        target = _with_reasoning(target, attempt.settings, request)
        return await count_tokens(target, attempt.index, request, attempt.settings.history)

    async def stored_answer(self, caller: Caller, call: str) -> StoredAnswer | None:
        """Return a recorded call of the caller's attempt, unless its answer was deleted."""
        if caller.direct:
            kept = self.recorder.direct.get(caller.attempt.rollout, call)
            return None if kept is None else StoredAnswer(kept, kept.messages, kept.tools or ())
        chain = await self._store.read(queries.response_chain, caller.attempt.run, caller.attempt.id, call)
        if not chain:
            return None
        tools = next((made.tools for made in reversed(chain) if made.tools is not None), ())
        made = chain[-1]
        reasoning = (made.response or {}).get("reasoning_content") or ""
        model = self.models.get(made.policy)
        count = count_reasoning_tokens(model.tokenizer, made.completion_ids, reasoning) if model and reasoning else 0
        return StoredAnswer(made, chain_messages(chain), tools, count)

    async def delete_answer(self, caller: Caller, call: str) -> None:
        """Delete the answer of a call for its agent."""
        if caller.direct:
            self.recorder.direct.delete(caller.attempt.rollout, call)
            return
        await self._store.delete_response(caller.attempt.run, caller.attempt.id, call)

    async def model_names(self, run: str | None) -> list[str]:
        """Return the model names that a run can use; with one policy and no routes it may use any other name too."""
        routed = (await self._settings_of(run)).routes if run is not None else {}
        routes = [name for name in routed if "*" not in name]
        others = await self.upstream.models() if self.upstream is not None and not self.models else []
        return list(dict.fromkeys([*self.models, *routes, *others]))

    async def serves(self, model: str, run: str | None) -> bool:
        """Return whether a call of a run for this model name would be answered, in a role that it may have."""
        settings = await self._settings_of(run) if run is not None else RunSettings()
        if settings.role_routes:
            return True
        try:
            self._route(model, settings)
        except GatewayError:
            return False
        return True

    def _route(self, model: str, settings: RunSettings, role: str | None = None) -> ServedModel | AnswerSource:
        """Find what serves a call: by the route of its role or its name, the policy of that name, the only one, or the
        upstream."""
        target = settings.role_routes.get(role or "") or route_target(model, settings.routes)
        if isinstance(target, FixedAnswer):
            return FixedAnswerSource(target.answer)
        name = model if target is None else target
        if name in self.models:
            return self.models[name]
        if self.upstream is not None and (target == self.upstream.policy or not self.models):
            return self.upstream
        if len(self.models) == 1 and not settings.routes:
            return next(iter(self.models.values()))
        message = f"no model {model!r} is served here: name it in the run's routes"
        if settings.role_routes:
            message += (
                f", or add its role {role!r} to the `roles` of a policy, or leave one policy without roles and models"
                if role
                else ", or route its role (the call has none: name it in `x-leyden-role` or in the URL, or write a "
                "rule for its system prompt in `[roles]`: the role of a span is known only after the call)"
            )
        raise GatewayError(ErrorKind.NO_MODEL, message, "model")

    def _tell_ignored(self, caller: Caller, names: Sequence[str]) -> None:
        """Say once for each run what its calls request that has no effect."""
        run = "" if caller.direct else caller.attempt.run
        for name in names:
            if name not in self._told[run]:
                self._told[run].add(name)
                _log.warning("calls%s request what has no effect here: %s", f" of run {run}" if run else "", name)

    def _end_sessions(self, attempt: str) -> None:
        for model in self.models.values():
            model.engine.end_session(attempt)

    async def _settings_of(self, run: str) -> RunSettings:
        if run not in self._settings:
            self._settings[run] = (await self._store.read(queries.get_run, run)).settings
        return self._settings[run]

    async def _calls_by(self, caller: Caller) -> AttemptCalls:
        """Return the calls of a caller's attempt. A call outside rollouts has none before it: it is rendered anew."""
        if caller.direct:
            return AttemptCalls(caller.attempt, Purpose.EVAL, RunSettings(), CallTimes(), None, recorded=False)
        return await self._calls_of(caller.attempt)

    async def _calls_of(self, attempt: Attempt) -> AttemptCalls:
        """Return the calls of an attempt; read them from the record if the attempt started before this server."""
        if (known := self._attempts.get(attempt.id)) is not None:
            return known
        if (reading := self._reading.get(attempt.id)) is None:
            reading = self._reading[attempt.id] = asyncio.create_task(self._read_calls(attempt))
            reading.add_done_callback(lambda _: self._reading.pop(attempt.id, None))
        return await asyncio.shield(reading)  # also for other calls, if the first caller hangs up

    async def _read_calls(self, attempt: Attempt) -> AttemptCalls:
        settings, episode, started = await self._settings_of(attempt.run), None, self._started.get(attempt.id)
        if started is None:
            episode = await self._store.read(queries.get_episode, attempt.run, attempt.id)
            started = episode.rollout.purpose, episode.rollout.step
        purpose, step = started
        made = () if episode is None else episode.calls
        replay = await self._store.read(read_replay, attempt, made) if attempt.origin is not None else None
        settings = settings.at(step if purpose is Purpose.TRAIN else None)
        build = partial(AttemptCalls, attempt, purpose, settings, self.times[attempt.run], episode, replay)
        calls = build() if not made else await asyncio.to_thread(build)  # of thousands of calls it takes seconds
        if self._leases.get(attempt.id) is None:  # it ended meanwhile: no event would remove the entry
            raise GatewayError(ErrorKind.FORBIDDEN, f"attempt {attempt.id} has ended")
        self._attempts[attempt.id] = calls
        return calls


def _role(caller: Caller, request: GenerationRequest, settings: RunSettings) -> str | None:
    return caller.role or role_by_prompt(request.messages, settings.roles)


def _with_reasoning(model: ServedModel, settings: RunSettings, request: GenerationRequest) -> ServedModel:
    return model.with_reasoning(request.reasoning if settings.reasoning is None else settings.reasoning)


async def _grammar(
    model: ServedModel, request: GenerationRequest, prompt: Prompt, session: str, constrains_calls: bool
) -> str | None:
    """Return the grammar of an answer: of its format, or of its tool calls if a grammar constrains them."""
    if request.format is not None and request.tool_choice.mode != "required":  # a required call has no other format
        calls = bool(request.callable_tools)
        return await model.structured_output.grammar(request.format, prompt.ids, calls=calls, session=session)
    return await model.structured_output.call_grammar(request, prompt.ids, session) if constrains_calls else None


def _sampling(calls: AttemptCalls, requested: Sampling, number: int) -> Sampling:
    """Return the sampling of a call, the `number`-th of its attempt.

    Training uses the run's sampling, so that the rollouts of a group differ even if the agent requests temperature 0.
    Evaluation uses what the agent requests. A seed that is not given follows from run, rollout and number; that of a
    call outside rollouts is random.
    """
    settings, source = calls.settings, calls.attempt.rollout if calls.recorded else calls.attempt.id
    digest = blake2b(f"{settings.sampling.seed}/{source}/{number}".encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little") >> 1
    if calls.purpose in (Purpose.EVAL, Purpose.TEST):
        return replace(requested, seed=seed if requested.seed is None else requested.seed)
    limits = [limit for limit in (settings.sampling.max_tokens, requested.max_tokens) if limit is not None]
    return replace(settings.sampling, max_tokens=min(limits, default=None), stop=requested.stop, seed=seed)
