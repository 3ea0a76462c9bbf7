"""Records model calls: builds them, saves them durably, and adds them to the prefix index of their attempt.

Only a `CallRecording` builds a `Call`, for the engine and for upstreams alike. It saves the calls of one request once,
as ok, failed or abandoned.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from leyden.records import Call, CallStatus, Purpose, RunSettings, Sampling, VersionRun
from leyden.server.gateway.caller import Caller
from leyden.server.gateway.dialects.types import GenerationRequest, Message
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prefix_index import History, PrefixIndex
from leyden.server.gateway.prompt import Prompt
from leyden.store.errors import Conflict, NotFound, StoreError
from leyden.store.queue import ActiveLease
from leyden.store.store import Store
from leyden.wire import CallTimes


class AttemptCalls(Struct, frozen=True):
    """What the model calls of one attempt share: its lease, its run's settings and times, and the calls so far."""

    lease: ActiveLease
    settings: RunSettings
    times: CallTimes
    index: PrefixIndex

    def start(self, choices: int) -> int:
        """Start a request if the rollout's budget allows it; return how many calls had started before.

        It does not await, so that requests made at the same time cannot exceed the budget together.
        """
        max_calls, max_tokens = self.settings.max_calls, self.settings.max_tokens
        if max_calls is not None and self.index.started + choices > max_calls:
            message = f"this rollout has made {self.index.started} of its {max_calls} calls (max_calls)"
            raise GatewayError(ErrorKind.BUDGET_EXCEEDED, message)
        if max_tokens is not None and self.index.sampled_tokens >= max_tokens:
            raise GatewayError(
                ErrorKind.BUDGET_EXCEEDED, f"this rollout has sampled its {max_tokens} tokens (max_tokens)"
            )
        return self.index.start(choices)


class Recorder:
    """Saves calls and counts them for /metrics: by prompt origin and status, and those that are not trained on."""

    def __init__(self, store: Store) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.untrained: Counter[str] = Counter()
        """Calls of training rollouts that give no gradient, by reason."""
        self._store = store

    async def save(self, attempt: AttemptCalls, calls: Sequence[Call], history: History) -> None:
        """Save the calls of one request; they are durable when this returns."""
        lease, started = attempt.lease, time.perf_counter()
        try:
            await self._store.record_calls(lease.run, lease.attempt, calls)
        except (Conflict, NotFound) as error:
            raise GatewayError(ErrorKind.FORBIDDEN, str(error)) from error
        except StoreError as error:
            raise GatewayError(ErrorKind.FAILED, str(error), retry_after=1.0) from error
        attempt.times.store_s += time.perf_counter() - started
        for call in calls:
            attempt.index.add(call, history)
            self.counts[str(call.made), str(call.status)] += 1
            reason = call.unusable if attempt.settings.allow_biased_sampling else call.untrainable
            if reason is not None and lease.purpose is Purpose.TRAIN:
                self.untrained[reason] += 1


class RecordedAnswer(Struct, frozen=True, kw_only=True):
    """One answer, as it is recorded in a call. The answer of an upstream has no tokens."""

    response: Message | None
    finish: str
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    allowed: tuple[float, ...] | None = None
    versions: tuple[VersionRun, ...] = ()


class CallRecording:
    """Builds and saves the calls of one request, one for each of its `n` answers.

    It is a context manager around the generation of the answers. When the block ends, the calls are saved as ok; when
    it raises, as failed; when the caller disconnects (the block is cancelled or closed), as abandoned. A disconnect
    never interrupts the saving.
    """

    def __init__(
        self,
        recorder: Recorder,
        attempt: AttemptCalls,
        caller: Caller,
        request: GenerationRequest,
        prompt: Prompt,
        sampling: Sampling,
        answers: Callable[[], Sequence[RecordedAnswer]],
    ) -> None:
        """`answers` is called once, when the calls are saved."""
        self._recorder, self._attempt, self._caller = recorder, attempt, caller
        self._request, self._prompt, self._sampling, self._answers = request, prompt, sampling, answers
        self._started = time.time()
        self._discarded = False
        self._saving: asyncio.Task[None] | None = None
        first = f"call-{secrets.token_hex(8)}"
        self.ids = (first, *(f"{first}-{choice}" for choice in range(1, request.n)))

    def discard(self) -> None:
        """Do not save a failed call: nothing was generated."""
        self._discarded = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self._save(CallStatus.OK)
        elif isinstance(error, GeneratorExit | asyncio.CancelledError):
            with suppress(GatewayError):  # the attempt may have ended, too
                await self._save(CallStatus.ABANDONED)
        elif not self._discarded:
            await self._save(CallStatus.FAILED)

    async def _save(self, status: CallStatus) -> None:
        answers = self._answers()
        calls = [self._call(choice, answer, status) for choice, answer in enumerate(answers)]
        self._saving = asyncio.create_task(self._recorder.save(self._attempt, calls, self._prompt.history))
        await asyncio.shield(self._saving)

    def _call(self, choice: int, answer: RecordedAnswer, status: CallStatus) -> Call:
        return Call(
            id=self.ids[choice],
            choice=choice,
            policy=self._prompt.history.policy,
            role=self._caller.role,
            span=self._caller.span,
            made=self._prompt.origin,
            made_why=self._prompt.reason,
            status=status,
            finish=answer.finish if status is CallStatus.OK else str(status),
            completion_ids=answer.completion_ids,
            logprobs=answer.logprobs,
            allowed=answer.allowed,
            versions=answer.versions,
            sampling=self._sampling,
            response=answer.response,
            started=self._started,
            ended=time.time(),
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
            "retry_of": self._attempt.index.same_request(history) if self._caller.retry else None,
            "request": self._request.request,
        }

    def _further_choice(self) -> dict[str, Any]:
        """Return how the other choices refer to the first one, whose prompt they keep."""
        prompt = self._prompt
        return {"parent": self.ids[0], "kept_ids": len(prompt.ids), "kept_messages": len(prompt.history.messages)}
