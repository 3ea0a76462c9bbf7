"""The protocol by which a trainer reports: the console, the metrics log and the sinks implement it."""

from collections.abc import Sequence
from typing import Protocol

from leyden.episodes import Episode
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
