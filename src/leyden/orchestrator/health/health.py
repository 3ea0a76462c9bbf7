"""Runs every detector over what a training shows, and words their warnings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leyden.config import Config
from leyden.episodes import Episode
from leyden.orchestrator.health.collapse import CollapseDetector
from leyden.orchestrator.health.correction import CorrectionDetector
from leyden.orchestrator.health.failures import FailureShare, FailureStreak
from leyden.orchestrator.health.mismatch import MismatchDetector
from leyden.orchestrator.health.position import PositionDetector
from leyden.orchestrator.health.standstill import StandstillDetector
from leyden.orchestrator.report.metrics_log import step_metrics
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.evaluation import EvaluationResult


class Health:
    """The health of the rollouts of one run; `lines` are the metrics of its steps before it was resumed."""

    def __init__(self, run: str, tasks: int, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tasks` is how many different tasks the run has."""
        self._collapse = CollapseDetector.of(lines)
        self._streak, self._share = FailureStreak(tasks), FailureShare(run)

    def add_rollouts(self, what: str, episodes: Sequence[Episode]) -> str | None:
        """Return a warning if most of these rollouts failed."""
        message = self._share.add(episodes)
        return None if message is None else f"{what}: {message}."

    def check_streak(self, episodes: Sequence[Episode]) -> None:
        """Raise if too many tasks have failed in a row, these included."""
        self._streak.add(episodes)

    def find_collapse(self, step: int, held_out: EvaluationResult | None) -> str | None:
        """Return that the held-out reward collapses; the checkpoint that was best before is then worth keeping."""
        return None if held_out is None else self._collapse.add_held_out(step, held_out.reward, held_out.error)


class PolicyHealth:
    """The health of one policy, whose configuration this is; `lines` are its metrics before it was resumed."""

    def __init__(self, config: Config, position_advice: str | None, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self._collapse = CollapseDetector.of(lines)
        self._standstill = StandstillDetector.of(lines, config.training)
        self._mismatch, self._correction = MismatchDetector(), CorrectionDetector(config)
        self._position = PositionDetector(position_advice)

    def find_collapse(self, report: StepReport) -> str | None:
        """Return that the entropy collapses in a step."""
        return self._collapse.add_entropy(report.entropy)

    def find_warnings(self, report: StepReport) -> Iterator[str]:
        """Yield what else is wrong with a step."""
        same_weights = max(report.staleness, default=0) == 0
        statistics = report.metrics[0].statistics if report.metrics else {}
        for message in (
            self._mismatch.add_step(statistics) if same_weights else None,
            self._correction.add_step(statistics),
            self._position.add_step(report.accounting.advantages),
            self._standstill.add_step(report.step, step_metrics(report)),
        ):
            if message is not None:
                yield message
