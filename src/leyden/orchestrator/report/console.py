"""Prints one line for each step, and shows the progress in between on a terminal."""

from collections.abc import Sequence
from datetime import timedelta
from statistics import fmean

from rich.console import Console
from rich.markup import escape

from leyden.episodes import Episode
from leyden.orchestrator.report.progress_line import ProgressLine
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.evaluation import EvaluationResult


class ConsoleReport:
    """Writes to a console. `held_out`, `error` and `measured_at` are of the last evaluation of a run that resumes."""

    def __init__(
        self,
        console: Console,
        steps: int,
        held_out: float | None = None,
        error: float | None = None,
        measured_at: int = 0,
        several: bool = False,
    ) -> None:
        """With `several` policies each line of a step names its policy."""
        self._console, self._steps, self._several = console, steps, several
        self._held_out, self._measured_at = None if held_out is None else _reward(held_out, error), measured_at
        self._line, self._progress = ProgressLine(console), dict[str, str]()

    def progress(self, step: int, done: int, total: int, what: str) -> None:
        """Show the progress of a step on a terminal, beside that of an evaluation which is not done yet."""
        self._progress[what] = f"step {step}: {done} of {total} {what}"
        self._line.show("   ".join(self._progress.values()))
        if done == total:
            del self._progress[what]

    def measured(self, step: int, measured: EvaluationResult, episodes: Sequence[Episode]) -> None:
        """Print the evaluation before training; later ones come with their steps."""
        self._held_out, self._measured_at = _reward(measured.reward, measured.error), step
        if step == 0:
            self._print(f"before  held-out reward {self._held_out}  {_counts(measured.outcomes)}")

    def tested(self, step: int, measured: EvaluationResult) -> None:
        """Print the evaluation on the test tasks."""
        self._print(
            f"test    reward {_reward(measured.reward, measured.error)} of step {step}  {_counts(measured.outcomes)}"
        )

    def warn(self, message: str) -> None:
        """Print a warning."""
        self._print(f"[yellow]{escape(message)}[/]")

    def step(self, report: StepReport, left_s: float) -> None:
        """Print the results of a step."""
        accounting = report.accounting
        trained = sum(metric.tokens for metric in report.metrics)
        parts = [
            f"[bold]step {report.step:>{len(str(self._steps))}}/{self._steps}[/]",
            _rewards(report),
            self._evaluated(report),
            _counts(accounting.outcomes),
            f"{accounting.groups_flat} of {accounting.groups} groups flat",
            "entropy none" if report.entropy is None else f"entropy {report.entropy:.2f}",
            f"{report.sampled} tokens",
            "sampled before" if report.sampling_speed is None else f"{report.sampling_speed:.0f} tok/s sampled",
            f"{_speed(trained, report.training_s)} tok/s trained",
            f"{timedelta(seconds=round(left_s))} left",
        ]
        if report.own_rewards:
            parts.insert(2, f"own {fmean(report.own_rewards):.3f}")
        if self._several:
            parts.insert(1, f"[bold]{report.policy}[/]")
        if accounting.groups_dropped:
            dropped = accounting.groups_dropped
            parts.insert(-6, f"[yellow]{dropped} group{'s' if dropped > 1 else ''} dropped[/]")
        if not report.metrics:
            why = "every token was too old" if accounting.tokens_stale else "every group was worth the same"
            if self._several and not accounting.trained and accounting.excluded:
                ((why, _),) = accounting.excluded.most_common(1)
            parts.insert(-6, f"[yellow]no update: {why}[/]")
        self._print("  ".join(filter(None, parts)))

    def _evaluated(self, report: StepReport) -> str:
        """Return the last held-out reward, with its step if that is an earlier one; "" if there is none."""
        if self._held_out is None:
            return ""
        return f"held-out {self._held_out}" + ("" if report.held_out is not None else f" (step {self._measured_at})")

    def close(self) -> None:
        """Stop showing progress."""
        self._line.close()

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _rewards(report: StepReport) -> str:
    """Return the mean rewards of rollouts that begin with their tasks, and of those that begin inside others."""
    found = []
    if report.reward is not None or not report.branches.rewards:
        found.append(f"reward {_number(report.reward)} sd {report.spread:.2f}")
    if report.branches.rewards:
        found.append(f"continued {fmean(report.branches.rewards):.3f}")
    return "  ".join(found)


def _reward(reward: float | None, error: float | None) -> str:
    return _number(reward) + (f" ± {error:.3f}" if error is not None else "")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.0f}" if seconds > 0 else "0"


def _counts(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{count} {ending.replace('_', ' ')}" for ending, count in sorted(outcomes.items()))
