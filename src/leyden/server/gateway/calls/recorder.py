"""Records model calls: builds them, saves them durably, and adds them to the prefix index of their attempt.

Only a `CallRecording` builds a `Call`, for the engine and for upstreams alike. It saves the calls of one request once,
as ok, cut, failed or abandoned.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from leyden.backoff import Backoff
from leyden.records import Call, CallStatus, DivergedCall, Purpose, Sampling, VersionRun, WaitInterval
from leyden.server.gateway.answers.strict_checks import StrictChecks
from leyden.server.gateway.answers.structured_output import is_strict
from leyden.server.gateway.calls.attempt_calls import AttemptCalls
from leyden.server.gateway.calls.caller import Caller
from leyden.server.gateway.calls.waiting import WaitTimer
from leyden.server.gateway.dialects.types import GenerationRequest, Message, ToolCall
from leyden.server.gateway.errors import ErrorKind, GatewayError, invalid
from leyden.server.gateway.prompts.history import History
from leyden.server.gateway.prompts.prompt import Prompt
from leyden.store.errors import Conflict, NotFound, NotStorable, StoreClosed, StoreError, StoreLost, StoreUnavailable
from leyden.store.store import Store

_STORE_WAIT_S = 300.0
_BACKOFF = Backoff(first_s=0.1, max_s=2.0)
_log = logging.getLogger("leyden.server")
MAX_CALLS, MAX_BYTES = 1000, 16 << 20
"""How many calls are kept, and how much text their requests may have together; tokens take several times as much."""


class Recorder:
    """Saves calls and counts them for /metrics: by prompt origin and status, and those that are not trained on."""

    def __init__(self, store: Store) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.untrained: Counter[str] = Counter()
        """Calls of training rollouts that give no gradient, by reason."""
        self.strict = StrictChecks()
        self.direct = DirectAnswers()
        self._store = store

    async def save(self, attempt: AttemptCalls, calls: Sequence[Call], history: History) -> None:
        """Save the calls of one request; they are durable when this returns. Waits while the disk is full."""
        if not attempt.recorded:
            self.direct.add(attempt.attempt.rollout, calls, history.sizes[-1])
            return
        await self._write(attempt, partial(self._store.record_calls, attempt.attempt.run, attempt.attempt.id, calls))
        for call in calls:
            attempt.add(call, history)
            self.counts[str(call.prompt_origin), str(call.status)] += 1
            reason = call.unusable if attempt.settings.allow_biased_sampling else call.untrainable
            if reason is not None and attempt.purpose is Purpose.TRAIN:
                self.untrained[reason] += 1

    async def diverge(self, attempt: AttemptCalls, why: str) -> None:
        """Replay nothing more in an attempt whose next call the record does not have; this is durable, too."""
        found, number = attempt.attempt, attempt.index.started + 1
        attempt.replay = None
        _log.warning("attempt %s leaves the record that it replays at call %d: %s", found.id, number, why)
        diverged = DivergedCall(number, why)
        await self._write(attempt, partial(self._store.record_divergence, found.run, found.id, diverged))

    async def _write(self, attempt: AttemptCalls, write: Callable[[], Awaitable[object]]) -> None:
        """Write to the store what an attempt's calls cannot do without."""
        started = time.perf_counter()
        try:
            with attempt.saving() as timer:
                await self._patiently(write, timer)
        except (Conflict, NotFound) as error:
            raise GatewayError(ErrorKind.FORBIDDEN, str(error)) from error
        except NotStorable as error:
            raise invalid(str(error)) from error
        except StoreError as error:
            raise GatewayError(ErrorKind.FAILED, str(error), retry_after=1.0) from error
        attempt.times.store_s += time.perf_counter() - started

    async def _patiently(self, write: Callable[[], Awaitable[object]], timer: WaitTimer) -> None:
        """Try for some minutes: an agent would fail if the disk is full, and would be charged for it."""
        deadline, failures = time.monotonic() + _STORE_WAIT_S, 0
        while True:
            try:
                await write()
                return
            except StoreUnavailable as error:
                if time.monotonic() > deadline or isinstance(error, StoreClosed | StoreLost):
                    raise
                failures += 1
                timer.begin("store")
                await _BACKOFF.wait(failures)

    def count_strict(self, request: GenerationRequest, calls: Sequence[ToolCall], session: str) -> None:
        """Have the calls of strict tools checked that no grammar enforced."""
        functions = [tool["function"] for tool in request.callable_tools] if calls else []
        schemas = {function["name"]: function.get("parameters") for function in functions if is_strict(function)}
        strict = [call for call in calls if call.name in schemas]
        self.strict.counts.update("invalid" for call in strict if call.malformed is not None)
        if readable := [(call.arguments, schemas[call.name]) for call in strict if call.malformed is None]:
            self.strict.add(session, readable)


class PreparedCall(Struct, frozen=True):
    """A request that is about to be answered."""

    attempt: AttemptCalls
    caller: Caller
    request: GenerationRequest
    prompt: Prompt
    sampling: Sampling
    replayed: tuple[Call, ...] = ()
    """The recorded calls that answer it. They keep their ids."""


class RecordedAnswer(Struct, frozen=True, kw_only=True):
    """One answer, as it is recorded in a call. The answer of an upstream has no tokens."""

    response: Message | None
    finish: str
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    allowed: tuple[float, ...] | None = None
    versions: tuple[VersionRun, ...] = ()
    usage: Any = None
    context_tail: int = 0
    waits: tuple[WaitInterval, ...] = ()
    complete: bool = True
    """Whether it ended by itself or by a limit of its request; false if the rollout's limit cut it."""


class CallRecording:
    """Builds and saves the calls of one request, one for each of its `n` answers.

    It is a context manager around the generation of the answers. When the block ends, the calls are saved as ok, or as
    cut if the rollout's token budget ended them; when it raises, as failed; when the caller disconnects (the block
    is cancelled or closed), as abandoned, or as cut if the rollout has reached a limit. `cut` saves them while the
    block runs. Nothing interrupts the saving, and it happens once.
    """

    def __init__(self, recorder: Recorder, call: PreparedCall, answers: Callable[[], Sequence[RecordedAnswer]]) -> None:
        """`answers` is called once, when the calls are saved."""
        self._recorder, self._answers = recorder, answers
        self._attempt, self._caller, self._request = call.attempt, call.caller, call.request
        self._prompt, self._sampling = call.prompt, call.sampling
        self._started = time.time()
        self._discarded = False
        self._saving: asyncio.Task[None] | None = None
        first = f"call-{secrets.token_hex(8)}"
        new = (first, *(f"{first}-{choice}" for choice in range(1, call.request.n)))
        self.ids = tuple(replayed.id for replayed in call.replayed) or new
        self._origin = call.replayed[0].origin if call.replayed else None

    def discard(self) -> None:
        """Do not save a failed call: nothing was generated."""
        self._discarded = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self._save()
        elif isinstance(error, GeneratorExit | asyncio.CancelledError):
            with suppress(GatewayError):  # the attempt may have ended, too
                await self._save(None if self._attempt.limit_reached else CallStatus.ABANDONED)
        elif not self._discarded or self._saving is not None:
            await self._save(CallStatus.FAILED)

    async def cut(self) -> None:
        """Save the calls now, as cut if they are not complete."""
        await self._save()

    async def _save(self, status: CallStatus | None = None) -> None:
        """Save the calls unless that has begun; without a status, as ok or cut."""
        if self._saving is None:
            calls = [self._call(choice, answer, status) for choice, answer in enumerate(self._answers())]
            for call in calls:
                self._attempt.index.add_request(call, self._prompt.history)
            self._saving = asyncio.create_task(self._recorder.save(self._attempt, calls, self._prompt.history))
            self._saving.add_done_callback(_log_failure)
            del self._answers  # with the object that it belongs to and that has this one: no cycle keeps the prompt
        await asyncio.shield(self._saving)

    def _call(self, choice: int, answer: RecordedAnswer, status: CallStatus | None) -> Call:
        status = status or (CallStatus.OK if answer.complete else CallStatus.CUT)
        return Call(
            id=self.ids[choice],
            choice=choice,
            policy=self._prompt.history.policy,
            role=self._caller.role,
            span=self._caller.span,
            prompt_origin=self._prompt.origin,
            origin_reason=self._prompt.reason,
            status=status,
            finish=answer.finish if status is CallStatus.OK else str(status),
            completion_ids=answer.completion_ids,
            logprobs=answer.logprobs,
            allowed=answer.allowed,
            versions=answer.versions,
            sampling=self._sampling,
            response=answer.response,
            usage=answer.usage,
            started=self._started,
            ended=time.time(),
            context_tail=answer.context_tail,
            origin=self._origin,
            waits=answer.waits,
            **(self._difference() if choice == 0 else self._further_choice()),
        )

    def _difference(self) -> dict[str, Any]:
        """Return what the first choice adds to its parent. Calls that share messages also share the tools."""
        prompt, history, match = self._prompt, self._prompt.history, self._prompt.match
        parent = match.call.id if match.call is not None else None
        shared = match.shared_messages if parent is not None else 0
        return {
            "parent": parent,
            "kept_ids": prompt.kept,
            "kept_messages": shared,
            "prompt_ids": tuple(prompt.ids[prompt.kept :]),
            "messages": tuple(history.messages[shared:]),
            "tools": history.tools if parent is None else None,
            "retry_of": self._attempt.index.retried_call(history, self._caller.retry),
            "request": self._request.request,
        }

    def _further_choice(self) -> dict[str, Any]:
        """Return how the other choices refer to the first one, whose prompt they keep."""
        prompt = self._prompt
        return {"parent": self.ids[0], "kept_ids": len(prompt.ids), "kept_messages": len(prompt.history.messages)}


def _log_failure(saving: asyncio.Task[None]) -> None:
    """Log a failure that no request may wait for any more; that an attempt has ended meanwhile is none."""
    if not saving.cancelled() and (error := saving.exception()) is not None and not isinstance(error, GatewayError):
        _log.error("a call cannot be saved", exc_info=error)


class DirectAnswers:
    """The latest calls outside rollouts, for the Responses API, which continues them; each is its own key's only."""

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[str, str], tuple[Call, int]] = OrderedDict()
        """By key and id, a call and the size of its request."""
        self._bytes = 0

    def add(self, owner: str, calls: Sequence[Call], size: int) -> None:
        """Keep the calls of a request of this size; the oldest calls of all keys are forgotten."""
        for call in calls:
            self._calls[owner, call.id] = call, size
            self._bytes += size
        while len(self._calls) > MAX_CALLS or self._bytes > MAX_BYTES:
            self.delete(*next(iter(self._calls)))

    def get(self, owner: str, call: str) -> Call | None:
        """Return a call of a key, if it is still kept."""
        return self._calls.get((owner, call), (None,))[0]

    def delete(self, owner: str, call: str) -> None:
        """Forget a call."""
        _, size = self._calls.pop((owner, call), (None, 0))
        self._bytes -= size
