"""A station: a runner, and the attempts in it from the first to the last.

It is *worn* when its runner has died, when code that is out of time does not return, or when something blocks its event
loop. Then it takes no new work, the others in it may finish for a while, and what hangs ends with the process.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from leyden.client.attempt.leased import ActiveAttempt
from leyden.client.host_protocol import AttemptEnd, HostStopping, StepReward
from leyden.client.runners.base import Runner
from leyden.outcomes import Ending, Outcome, Retry

_log = logging.getLogger("leyden.worker")
_LINES, _LONGEST = 20, 4000
_DEAF = "its process was ended, in which code of one attempt let nothing else run"


class TimeLimits(Struct, frozen=True):
    """How long things may take at a station."""

    attempt_s: float
    """One attempt."""
    drain_s: float
    """The others, where one hangs."""
    deaf_s: float
    """The runner, to answer."""


class RunnerSupervisor:
    """Runs attempts until it is worn. One that is `alone` has a single attempt, whose own fault its death then is."""

    def __init__(self, runner: Runner, limits: TimeLimits, *, alone: bool = False) -> None:
        self.runner, self._limits, self._alone = runner, limits, alone
        self.worn = asyncio.Event()
        self.fruitful = False
        """Whether any attempt has come to its end here."""
        self._jobs: dict[str, ActiveAttempt] = {}
        """Those whose code has not returned."""
        self._hanging: set[str] = set()
        self._deaf = False
        self._blocker: str | None = None
        self._changed = asyncio.Event()

    async def work(self) -> None:
        """Listen to the runner until it is gone, or there is no more to expect of it; then it ends, with all in it."""
        watching = asyncio.create_task(self._watch())
        listening = asyncio.create_task(self.runner.listen(self._hear))
        wearing = asyncio.create_task(self._wear_out())
        try:
            await asyncio.wait((listening, wearing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            died = listening.done()
            for task in (watching, listening, wearing):
                task.cancel()
            self.worn.set()
            await asyncio.shield(self._end(died))

    async def see(self, job: ActiveAttempt, lent: Mapping[str, str]) -> AttemptEnd | None:
        """Have an attempt run, for as long as it may; how it ended, None where the server has ended it."""
        if job.settled.done():
            job.left.set()
            return None
        self._jobs[job.id] = job
        self.runner.run(job.lease, lent)
        limit_s = self._limits.attempt_s
        late = AttemptEnd(job.id, Outcome(Ending.TIMEOUT, f"the agent took longer than {limit_s:g} s"))
        timer = asyncio.get_running_loop().call_later(limit_s, job.settle, late)
        try:
            ended = await job.settled
        finally:
            timer.cancel()
        if job.left.is_set():
            return ended
        asyncio.get_running_loop().call_later(self.runner.return_s, self._expect_return, job)
        stopping = await self.runner.stop(job.id)
        output = stopping.output if stopping is not None else self.runner.output()
        if stopping is None or stopping.blocked_by is not None:
            self._deaf = True
            self._wear("code in it lets nothing else run")
            if ended is late:
                ended = self._innocent(job.id, stopping) or late
        return ended and replace(ended, output=output)

    def _innocent(self, attempt: str, stopping: HostStopping | None) -> AttemptEnd | None:
        """How an attempt ends that is out of time because another kept it from running, or may be; None: it has none.

        Of code that lets no thread run nobody can say whose it is, unless there is only one in the process.
        """
        if stopping is not None and stopping.blocked_by != attempt:
            why = f"attempt {stopping.blocked_by} blocked the event loop of the process that both were in"
            return AttemptEnd(attempt, Outcome(Ending.LOST, why), retry=Retry.FREE)
        if stopping is None and len(self._jobs) > 1:
            return AttemptEnd(attempt, Outcome(Ending.LOST, _DEAF), retry=Retry.ALONE)
        return None

    async def leave(self, job: ActiveAttempt) -> None:
        """Wait until an attempt that has ended is no burden any more: its code has returned, or the station is worn."""
        if job.left.is_set():
            return
        worn = asyncio.ensure_future(self.worn.wait())
        left = asyncio.ensure_future(job.left.wait())
        try:
            await asyncio.wait((worn, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            worn.cancel()
            left.cancel()

    def _hear(self, said: AttemptEnd | StepReward) -> None:
        if isinstance(said, StepReward):
            if (known := self._jobs.get(said.attempt)) is not None:
                known.rewards.append(said.reward)
            return
        self.fruitful = True
        self._hanging.discard(said.attempt)
        job = self._jobs.pop(said.attempt)
        job.settle(said)
        job.left.set()
        self._changed.set()

    def _expect_return(self, job: ActiveAttempt) -> None:
        if not job.left.is_set():
            self._hanging.add(job.id)
            self._wear(f"attempt {job.id} is out of time and does not return")

    async def _watch(self) -> None:
        """Notice when the runner cannot run anything new, and when it can again. Who is alone is in nobody's way."""
        while not self._alone:
            await asyncio.sleep(self._limits.deaf_s / 3)
            self._deaf = not await self.runner.answers(self._limits.deaf_s)
            if self._deaf:
                self._wear("something blocks its event loop")

    def _wear(self, why: str) -> None:
        if not self.worn.is_set() and not self._alone:
            _log.warning("a host takes no new work, and another takes its place: %s", why)
        self.worn.set()
        self._changed.set()

    async def _wear_out(self) -> None:
        """Wait until a worn station is empty, or its time is up and something in it hangs."""
        await self.worn.wait()
        patience = asyncio.get_running_loop().time() + self._limits.drain_s
        while self._jobs:
            over = asyncio.get_running_loop().time() >= patience
            if over and (self._hanging or self._deaf):
                self._blocker = await self.runner.blocker() if self._deaf else None
                return
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if over else patience):
                    await self._changed.wait()

    async def _end(self, died: bool) -> None:
        await self.runner.close(at_once=self._deaf)
        if not self._jobs:
            return
        how = await self.runner.death()
        if died:
            _log.warning("a host died with %d attempts in it (%s)", len(self._jobs), how.partition("\n")[0])
        for job in self._jobs.values():
            job.settle(self._verdict(job.id, died, how))
            job.left.set()
        self._jobs.clear()

    def _verdict(self, attempt: str, died: bool, how: str) -> AttemptEnd:
        """How an attempt ended whose code had not returned when the runner went."""
        if attempt == self._blocker:
            why = "it blocked the event loop of its process, which was ended"
            return AttemptEnd(attempt, Outcome(Ending.LOST, why), retry=Retry.ALONE)
        if not died and self._deaf and self._blocker is None:
            return AttemptEnd(attempt, Outcome(Ending.LOST, _DEAF), retry=Retry.ALONE)
        if not died:
            why = "its process was ended, in which something else hung"
            return AttemptEnd(attempt, Outcome(Ending.LOST, why), retry=Retry.FREE)
        if self._alone:
            printed = self.runner.output()
            last = printed.rstrip().splitlines()[-_LINES:]
            message = "\n".join((f"the agent's process died, and not for the first time: {how}", *last))[:_LONGEST]
            return AttemptEnd(attempt, Outcome(Ending.AGENT_ERROR, message), output=printed)
        message = f"the process that ran the agent died: {how}"[:_LONGEST]
        return AttemptEnd(attempt, Outcome(Ending.LOST, message), retry=Retry.ALONE)
