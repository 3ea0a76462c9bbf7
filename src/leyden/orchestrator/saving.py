"""Saves checkpoints while training goes on, and remembers which one is kept because the run collapsed after it."""

import asyncio
from functools import partial

from leyden.learner.protocol import Learner, TrainerState
from leyden.orchestrator.disk_room import when_there_is_room
from leyden.orchestrator.report.reports import Reports


class Saver:
    """Saves the training of one policy, which starts from a state."""

    def __init__(self, learner: Learner, reports: Reports, state: TrainerState) -> None:
        self._learner, self._reports = learner, reports
        self._writing: asyncio.Task[None] | None = None
        self.newest = state.step or None
        """Step of the newest checkpoint."""
        self.kept_step = state.kept_step

    async def save(self, state: TrainerState) -> None:
        """Copy a checkpoint, which is then written as soon as the disk has room for it and the one before is."""
        await self.finish()
        learner, what, warn = self._learner, f"the checkpoint of step {state.step}", self._reports.warn
        await when_there_is_room(what, partial(learner.save, state.policy, state), warn)
        write = when_there_is_room(what, partial(learner.finish_save, state.policy), warn)
        self._writing = asyncio.create_task(write)
        self.newest = state.step

    async def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def cancel(self) -> None:
        """Do not wait for room any more."""
        if self._writing is not None:
            self._writing.cancel()

    def keep_best(self, best_step: int | None) -> str:
        """Keep the checkpoint that a run which collapses may go back to; say which it is."""
        if best_step is not None:
            kept = "; its checkpoint is kept" if best_step else ", that is the model before training"
            return f"Step {best_step} was the best on the held-out tasks{kept}"
        if self.newest is None:
            return "No tasks are held out, and there is no checkpoint yet"
        self.kept_step = self.newest
        return f"No tasks are held out; the checkpoint of step {self.newest} is kept"
