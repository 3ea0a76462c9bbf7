"""Tells everybody who follows a training: the console, the metrics log and the sinks.

What is written waits for room on a full disk.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from leyden.episodes import Episode
from leyden.orchestrator.disk_room import when_there_is_room
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.evaluation import EvaluationResult


class TrainingObserver(Protocol):
    """Receives the progress and the results of a training."""

    def progress(self, step: int, done: int, total: int, what: str) -> None:
        """Called when rollouts of a step finish."""

    def step(self, report: StepReport, left_s: float) -> None:
        """Called after each step, with an estimate of the remaining time."""

    def measured(self, step: int, measured: EvaluationResult, episodes: Sequence[Episode]) -> None:
        """Called after each evaluation on the held-out tasks."""

    def tested(self, step: int, measured: EvaluationResult) -> None:
        """Called after the evaluation on the test tasks, with the step whose weights were evaluated."""

    def warn(self, message: str) -> None:
        """Called when the run seems to go wrong."""


class Reports:
    """The observers of a training."""

    def __init__(self, observers: Sequence[TrainingObserver]) -> None:
        self._observers = observers

    def progress(self, step: int, done: int, total: int, what: str) -> None:
        """Tell that rollouts of a step have finished."""
        for observer in self._observers:
            observer.progress(step, done, total, what)

    def warn(self, message: str | None) -> None:
        """Pass a warning on, if there is one."""
        for observer in self._observers if message is not None else ():
            observer.warn(str(message))

    async def step(self, report: StepReport, left_s: float) -> None:
        """Tell the results of a step."""
        await self._write(report.step, [partial(one.step, report, left_s) for one in self._observers])

    async def measured(self, step: int, measured: EvaluationResult, episodes: Sequence[Episode]) -> None:
        """Tell the result of an evaluation on the held-out tasks."""
        await self._write(step, [partial(one.measured, step, measured, episodes) for one in self._observers])

    async def tested(self, step: int, measured: EvaluationResult) -> None:
        """Tell the result of the evaluation on the test tasks."""
        await self._write(step, [partial(one.tested, step, measured) for one in self._observers])

    async def _write(self, step: int, writes: Sequence[Callable[[], None]]) -> None:
        for write in writes:
            await when_there_is_room(f"the metrics of step {step}", write, self.warn)
