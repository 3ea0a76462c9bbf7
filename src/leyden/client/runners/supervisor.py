"""Supervises one runner and the attempts in it.

A runner is retired when it has died, when code that exceeded its time limit does not return, or when something blocks
its event loop. A retired runner takes no new attempts. The others in it may finish within the drain time; then the
runner is closed, and attempts that still run in it are lost.
"""

import asyncio
import logging

from msgspec.structs import replace

from leyden.api.wire import FinishRequest
from leyden.background import start_background, wait_set
from leyden.client.attempt.active_attempt import ActiveAttempt, TimeLimit, TimeOut
from leyden.client.host_protocol import CodeReturned, StepReward, StopReply
from leyden.client.runners.factory import Runner
from leyden.client.worker.options import WorkerOptions
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import RewardKind

_log = logging.getLogger("leyden.worker")
_OUTPUT_LINES, _MAX_MESSAGE = 20, 4000
_MAX_STEP_REWARDS = 10_000
_EXCUSED_SHARE = 0.5
"""Part of the time limit for which the event loop must have been blocked if a time-out is excused."""
_LOOP_ERROR = "it ran beside others that used the same objects in the event loops of other threads"
_ENDED_HANGING = "its process was ended because another attempt in it hung"
_ENDED_UNRESPONSIVE = "its process was ended because code of one attempt let nothing else run"


class RunnerSupervisor:
    """Runs attempts in a runner until it is retired. If `alone`, it runs a single one, which is blamed for a crash."""

    def __init__(
        self, runner: Runner, options: WorkerOptions, time_out: TimeOut, *, slots: int = 1, alone: bool = False
    ) -> None:
        self.runner, self._time_out, self._alone = runner, time_out, alone
        self._time_limit_s, self._unresponsive_s = options.rollout.time_limit_s, options.unresponsive_s
        self._drain_s = 0.0 if alone else options.workers.drain_s
        self.slots = asyncio.Semaphore(slots)
        """One for each attempt that may run in it at the same time."""
        self._one_at_a_time = slots == 1
        self.retired = asyncio.Event()
        """Set when the runner takes no new attempts."""
        self.any_returned = False
        """Whether the code of any attempt has returned in this runner."""
        self.has_loop_errors = False
        """Whether attempts that ran at the same time used the same objects in different event loops."""
        self._attempts: dict[str, ActiveAttempt] = {}
        """Attempts whose code has not returned."""
        self._hanging: set[str] = set()
        self._flushing: set[str] = set()
        """Attempts whose spans are awaited before their ends are reported. The runner is not closed until then."""
        self._unresponsive = False
        self._blocker: str | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Listen to the runner until it has died, or is retired and drained; then close it."""
        monitoring = start_background(self._monitor(), "the monitor of a host process")
        listening = start_background(self.runner.listen(self._on_event), "the connection to a host process")
        draining = start_background(self._drain(), "the drain of a host process")
        try:
            await asyncio.wait((listening, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            died = listening.done()
            for task in (monitoring, listening, draining):
                task.cancel()
            self.retired.set()
            await asyncio.shield(self._close(died))

    async def run_attempt(self, active: ActiveAttempt) -> FinishRequest | None:
        """Run an attempt up to its time limit and return how it ended; None if the server has ended it."""
        if active.end.done():
            active.released.set()
            return None
        self._attempts[active.id] = active
        self.runner.start_attempt(active.lease)
        limit = TimeLimit(active, self._time_limit_s, self._time_out)
        try:
            end = await limit.wait_end()
            if not active.released.is_set():
                end = await self._stop(active, end, is_timeout=end is limit.timeout)
            if end is not None and active.has_spans:
                self._flushing.add(active.id)
                await self.runner.flush_spans(active.id)
            return end
        finally:
            self._flushing.discard(active.id)
            self._changed.set()

    async def _stop(self, active: ActiveAttempt, end: FinishRequest | None, is_timeout: bool) -> FinishRequest | None:
        """Stop an attempt that has ended before its code returned; return its end with its output."""
        asyncio.get_running_loop().call_later(self.runner.stop_timeout_s, self._check_returned, active)
        reply = await self.runner.stop(active.id)
        output = reply.output if reply is not None else self.runner.output()
        if reply is None or self._was_blocked(reply):
            self._unresponsive = True
            self._retire("code in it lets nothing else run")
            if is_timeout:
                end = self._excuse_timeout(active.id, reply) or end
        if is_timeout and self.has_loop_errors:  # an object of another loop may never wake its waiter
            end = FinishRequest(Outcome(Ending.LOST, _LOOP_ERROR), retry=Retry.FREE)
        active.has_spans = reply is not None and reply.has_spans
        return end and replace(end, output=output)

    async def wait_released(self, active: ActiveAttempt) -> None:
        """Wait until the code of an ended attempt has returned, or the runner is retired."""
        if active.released.is_set():
            return
        retired = asyncio.ensure_future(self.retired.wait())
        released = asyncio.ensure_future(active.released.wait())
        try:
            await asyncio.wait((retired, released), return_when=asyncio.FIRST_COMPLETED)
        finally:
            retired.cancel()
            released.cancel()

    def _on_event(self, event: CodeReturned | StepReward) -> None:
        if isinstance(event, StepReward):
            self._on_reward(event)
            return
        active = self._attempts.pop(event.attempt, None)
        if active is None:
            _log.warning("a runner reported the end of attempt %s, which it does not run: ignored", event.attempt)
            return
        self.any_returned = True
        self._hanging.discard(event.attempt)
        if event.has_spans and not active.end.done():
            active.has_spans = True
            self._flushing.add(event.attempt)
        end = _as_agents_may(event.report)
        active.resolve(self._excuse_loop_error(end) if event.loop_error and not self._alone else end)
        active.released.set()
        self._changed.set()

    def _on_reward(self, event: StepReward) -> None:
        """Keep what an agent may say: step rewards of attempts that run here. Agent code can write to the channel."""
        active, reward = self._attempts.get(event.attempt), event.reward
        if active is None or reward.kind is not RewardKind.STEP or len(active.step_rewards) >= _MAX_STEP_REWARDS:
            _log.warning("a reward of kind %s for attempt %s is ignored", reward.kind, event.attempt)
        else:
            active.step_rewards.append(replace(reward, source="agent"))

    def _check_returned(self, active: ActiveAttempt) -> None:
        if not active.released.is_set():
            self._hanging.add(active.id)
            self._retire(f"attempt {active.id} was stopped and does not return")

    async def _monitor(self) -> None:
        """Check whether the runner responds. One with a single attempt is not checked: it delays no other."""
        while not self._alone:
            await asyncio.sleep(self._unresponsive_s / 3)
            self._unresponsive = not await self.runner.is_responsive(self._unresponsive_s)
            if self._unresponsive:
                self._retire("something blocks its event loop")

    def _retire(self, reason: str) -> None:
        if not self.retired.is_set() and not self._alone:
            _log.warning("a host process takes no new attempts and is replaced: %s", reason)
        self.retired.set()
        self._changed.set()

    async def _drain(self) -> None:
        """Wait until a retired runner is not needed, or the drain time is over and something in it hangs."""
        await self.retired.wait()
        deadline = asyncio.get_running_loop().time() + self._drain_s
        while self._attempts or self._flushing:
            over = asyncio.get_running_loop().time() >= deadline
            hangs = self._hanging or self._unresponsive or self.has_loop_errors
            if over and not self._flushing and hangs:
                self._blocker = await self.runner.find_blocker() if self._unresponsive else None
                return
            self._changed.clear()
            await wait_set(self._changed, None if over else deadline - asyncio.get_running_loop().time())

    async def _close(self, died: bool) -> None:
        await self.runner.close(kill=self._unresponsive)
        if not self._attempts:
            return
        reason = await self.runner.exit_reason()
        if died:
            first_line = reason.partition("\n")[0]
            _log.warning("a host process died with %d attempts in it (%s)", len(self._attempts), first_line)
        for active in self._attempts.values():
            active.resolve(self._end_of_lost(active.id, died, reason))
            active.released.set()
        self._attempts.clear()

    def _was_blocked(self, reply: StopReply) -> bool:
        """Whether the loop is blocked and was so for long. Code that computes for a moment between awaits is normal."""
        return reply.blocked_by is not None and reply.blocked_s >= _EXCUSED_SHARE * self._time_limit_s

    def _excuse_loop_error(self, end: FinishRequest) -> FinishRequest:
        """Return the end of an attempt that is retried where no other runs: in the next runner, or alone."""
        outcome = Outcome(Ending.LOST, f"{_LOOP_ERROR}: {end.outcome.message}"[:_MAX_MESSAGE])
        if self._one_at_a_time:
            return replace(end, outcome=outcome, retry=Retry.ALONE)
        self.has_loop_errors = True
        self._retire("its attempts use the same objects in different event loops")
        return replace(end, outcome=outcome, retry=Retry.FREE)

    def _excuse_timeout(self, attempt: str, reply: StopReply | None) -> FinishRequest | None:
        """Return the end of an attempt that another kept from running in time; None if it was itself at fault.

        If the process lets no thread run, the attempt at fault is unknown, unless there is only one. An excused
        attempt is retried alone, where no other can keep it from running: it is excused once.
        """
        if reply is not None and reply.blocked_by != attempt:
            message = f"attempt {reply.blocked_by} blocked the event loop of the process that both ran in"
            return FinishRequest(Outcome(Ending.LOST, message), retry=Retry.ALONE)
        if reply is None and len(self._attempts) > 1:
            return FinishRequest(Outcome(Ending.LOST, _ENDED_UNRESPONSIVE), retry=Retry.ALONE)
        return None

    def _end_of_lost(self, attempt: str, died: bool, reason: str) -> FinishRequest:
        """Return the end of an attempt whose code had not returned when its runner was gone."""
        if attempt == self._blocker:
            message = "it blocked the event loop of its process, which was ended"
            return FinishRequest(Outcome(Ending.LOST, message), retry=Retry.ALONE)
        if not died and self._unresponsive and self._blocker is None:
            return FinishRequest(Outcome(Ending.LOST, _ENDED_UNRESPONSIVE), retry=Retry.ALONE)
        if not died:
            message = _LOOP_ERROR if self.has_loop_errors else _ENDED_HANGING
            return FinishRequest(Outcome(Ending.LOST, message), retry=Retry.FREE)
        if self._alone:
            output = self.runner.output()
            last_lines = output.rstrip().splitlines()[-_OUTPUT_LINES:]
            message = "\n".join((f"the agent's process died for the second time: {reason}", *last_lines))
            return FinishRequest(Outcome(Ending.AGENT_ERROR, message[:_MAX_MESSAGE]), output=output)
        message = f"the process that ran the agent died: {reason}"[:_MAX_MESSAGE]
        return FinishRequest(Outcome(Ending.LOST, message), retry=Retry.ALONE)


def _as_agents_may(end: FinishRequest) -> FinishRequest:
    """Return what agents may say of an end. Only the worker decides that a retry is free and who scores an attempt."""
    rewards = tuple(replace(reward, source="agent") for reward in end.rewards if reward.kind is RewardKind.FINAL)
    return FinishRequest(end.outcome, end.result, rewards, end.output)
