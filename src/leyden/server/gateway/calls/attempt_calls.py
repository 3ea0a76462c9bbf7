"""The model calls of one attempt: its budget, the calls in flight, how long they waited, and what failed them."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from leyden.api.wire import CallTimes
from leyden.episodes import Episode
from leyden.records import Attempt, Call, CallStatus, Purpose, RunSettings, WaitInterval
from leyden.server.gateway.calls.replay import Replay
from leyden.server.gateway.calls.waiting import WaitTimer, total_s
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prompts.history import History
from leyden.server.gateway.prompts.prefix_index import PrefixIndex


class CallInFlight(Protocol):
    """A model call that has not ended."""

    async def cut(self, reason: GatewayError) -> None:
        """Stop it, record what was sampled so far, and answer with this error."""

    def waits(self) -> Iterable[WaitInterval]:
        """Return the intervals in which it waited for a slot, new weights or a restart of the engine."""


class AttemptCalls:
    """What the model calls of one attempt share, from its first call until it ends."""

    def __init__(
        self,
        attempt: Attempt,
        purpose: Purpose,
        settings: RunSettings,
        times: CallTimes,
        episode: Episode | None,
        replay: Replay | None = None,
        recorded: bool = True,
    ) -> None:
        """`episode` is what was recorded before this server started; None for an attempt that started later."""
        self.attempt, self.purpose, self.settings, self.times = attempt, purpose, settings, times
        self.recorded = recorded
        """False for calls outside rollouts."""
        self.index = PrefixIndex() if episode is None else PrefixIndex.from_episode(episode)
        made = () if episode is None else episode.calls
        self.sampled_tokens = sum(len(call.completion_ids) for call in made)
        """Tokens that count for `max_tokens`, also those that it replays: their rollout had no more left."""
        self.replay = replay
        """What its next calls may replay; None: they are sampled."""
        self._waits = [wait for call in made for wait in call.waits]
        self.limit_reached = False
        """Whether a call was refused or cut because the rollout had reached a limit."""
        self.engine_crashes = 0
        """How often calls failed because the engine crashed."""
        self._crashed_at = 0.0
        self.refusal: str | None = None
        """Why calls were refused after a crash; None if none was."""
        self.failure: str | None = None
        """How the infrastructure failed a call; None once a call that started after the failure is answered."""
        self._failed_at = 0.0
        self._in_flight: set[CallInFlight] = set()
        self._saving: set[WaitTimer] = set()
        self._closed: GatewayError | None = None

    @property
    def waited_s(self) -> float:
        """How long at least one of the attempt's calls was waiting for the infrastructure."""
        in_flight = (wait for call in self._in_flight for wait in call.waits())
        saving = (wait for timer in self._saving for wait in timer.intervals())
        return total_s((*self._waits, *in_flight, *saving))

    def start(self, choices: int, replayed: bool = False) -> int:
        """Start a request if the rollout's limits allow it; return how many calls had started before.

        Requests made at the same time cannot exceed `max_calls` together; tokens count only when they are recorded. So
        a recorded rollout may have begun calls at the same time that one which replays it begins one after the other.
        """
        if self._closed is not None:
            if self._closed.kind is ErrorKind.FORBIDDEN:
                self.refusal = self._closed.message
            raise self._closed
        max_calls, max_tokens = self.settings.max_calls, self.settings.max_tokens
        assert not isinstance(max_calls, dict), "settings are those of a step"
        if max_calls is not None and self.index.started + choices > max_calls:
            self.limit_reached = True
            message = f"this rollout has made {self.index.started} of its {max_calls} calls (max_calls)"
            raise GatewayError(ErrorKind.BUDGET_EXCEEDED, message)
        if max_tokens is not None and self.sampled_tokens >= max_tokens and not replayed:
            self.limit_reached = True
            raise GatewayError(
                ErrorKind.BUDGET_EXCEEDED, f"this rollout has sampled its {max_tokens} tokens (max_tokens)"
            )
        return self.index.start(choices)

    @contextmanager
    def running(self, call: CallInFlight) -> Iterator[None]:
        """Count a call as in flight within this context."""
        self._in_flight.add(call)
        try:
            yield
        finally:
            self._in_flight.discard(call)

    @contextmanager
    def saving(self) -> Iterator[WaitTimer]:
        """Yield a timer for the time in which a call cannot be saved; the record does not have it."""
        timer = WaitTimer()
        self._saving.add(timer)
        try:
            yield timer
        finally:
            timer.end("store")
            self._saving.discard(timer)
            self._waits += timer.intervals()

    def add(self, call: Call, history: History) -> None:
        """Add a call that is recorded."""
        self.index.add(call, history)
        self.sampled_tokens += len(call.completion_ids)
        self._waits += call.waits
        self.limit_reached |= call.status is CallStatus.CUT
        if call.status in (CallStatus.OK, CallStatus.CUT):
            self._answered(call.started)

    @contextmanager
    def catching_failure(self) -> Iterator[None]:
        """Remember an error of the infrastructure that leaves this context."""
        try:
            yield
        except GatewayError as error:
            if error.is_infrastructure:
                self.fail(error.message)
            raise

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Remember how a call ends that is not recorded, and that lasts as long as this context."""
        started = time.time()
        with self.catching_failure():
            yield
        self._answered(started)

    def fail(self, message: str) -> None:
        """Remember that the infrastructure failed a call. Called before the agent learns of it, and can end."""
        self.failure, self._failed_at = message, time.time()

    def lose_engine(self, message: str, started: float) -> None:
        """Remember that the engine crashed during a call that had started then. Calls in flight count one crash.

        The call may be why, and SDKs repeat it. So after the second crash, and in a retry after the first, further
        calls are refused: a rollout crashes the engine little more often than it has attempts.
        """
        self.fail(message)
        if started > self._crashed_at:
            self.engine_crashes += 1
            self._crashed_at = time.time()
        if self._closed is None and self.engine_crashes > (self.attempt.number == 1):
            self._closed = GatewayError(ErrorKind.FORBIDDEN, f"{message}: this attempt makes no further calls")

    def _answered(self, started: float) -> None:
        if started > self._failed_at:
            self.failure = None

    async def cut(self, message: str) -> None:
        """Stop the calls in flight and refuse further ones; what was sampled is durable when this returns.

        Repeating it is harmless.
        """
        if self._closed is None:
            self._closed = GatewayError(ErrorKind.BUDGET_EXCEEDED, message)
        cutting = (call.cut(self._closed) for call in list(self._in_flight))
        for error in await asyncio.gather(*cutting, return_exceptions=True):
            ended = isinstance(error, GatewayError) and error.kind is ErrorKind.FORBIDDEN  # the attempt, meanwhile
            if error is not None and not ended:
                raise error
