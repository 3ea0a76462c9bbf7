"""Saves checkpoints, and remembers which one is kept because the run collapsed after it."""

from functools import partial

from leyden.learner.protocol import Learner, TrainerState
from leyden.orchestrator.disk_room import when_there_is_room
from leyden.orchestrator.report.reports import Reports


class Saver:
    """Saves the training of one policy, which starts from a state."""

    def __init__(self, learner: Learner, reports: Reports, state: TrainerState) -> None:
        self._learner, self._reports = learner, reports
        self.newest = state.step or None
        """Step of the newest checkpoint."""
        self.kept_step = state.kept_step

    async def save(self, state: TrainerState) -> None:
        """Write a checkpoint, as soon as the disk has room for it."""
        save = partial(self._learner.save, state.policy, state)
        await when_there_is_room(f"the checkpoint of step {state.step}", save, self._reports.warn)
        self.newest = state.step

    def keep_best(self, best_step: int | None) -> str:
        """Keep the checkpoint that a run which collapses may go back to; say which it is."""
        if best_step is not None:
            kept = "; its checkpoint is kept" if best_step else ", that is the model before training"
            return f"Step {best_step} was the best on the held-out tasks{kept}"
        if self.newest is None:
            return "No tasks are held out, and there is no checkpoint yet"
        self.kept_step = self.newest
        return f"No tasks are held out; the checkpoint of step {self.newest} is kept"
