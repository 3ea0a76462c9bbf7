"""A step in one line: what it says is of this run and of this process."""

import io

import pytest
from rich.console import Console
from smallepisodes import call

from leyden.orchestrator.credit.samples import StepAccounting
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.report.console import ConsoleReport
from leyden.orchestrator.report.progress_line import ProgressLine
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.branch_usage import BranchUsage
from leyden.orchestrator.rollouts.evaluation import EvaluationResult


def line(report: StepReport, held_out: float | None = None) -> str:
    console = Console(file=io.StringIO())
    ConsoleReport(console, 9, held_out).step(report, 0.0)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_resumed_run_shows_its_last_evaluation_until_the_next() -> None:
    assert "held-out 0.625 (step 0)" in line(StepReport(1, [1.0], StepAccounting()), 0.625)
    assert "held-out" not in line(StepReport(1, [1.0], StepAccounting()))  # no tasks are
    console = Console(file=io.StringIO())
    display = ConsoleReport(console, 9, 0.625, 0.125, 4)
    display.step(StepReport(1, [1.0], StepAccounting()), 0.0)
    assert isinstance(console.file, io.StringIO)
    assert "held-out 0.625 ± 0.125 (step 4)  " in console.file.getvalue()
    display.measured(2, EvaluationResult(0.75, None, 1, {}), [])
    display.step(StepReport(2, [1.0], StepAccounting(), held_out=EvaluationResult(0.75, None, 1, {})), 0.0)
    assert "held-out 0.750  " in console.file.getvalue()


def test_an_evaluation_beside_a_step_does_not_hide_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(ProgressLine, "show", lambda self, text: shown.append(text))
    display = ConsoleReport(Console(file=io.StringIO()), 9)
    display.progress(2, 3, 8, "held-out rollouts")
    display.progress(3, 1, 16, "rollouts")
    display.progress(2, 8, 8, "held-out rollouts")
    display.progress(3, 2, 16, "rollouts")
    assert shown[1] == "step 2: 3 of 8 held-out rollouts   step 3: 1 of 16 rollouts"
    assert shown[3] == "step 3: 2 of 16 rollouts"


def test_a_standard_deviation_is_not_written_like_a_standard_error() -> None:
    assert "reward 0.500 sd 0.71  held-out 0.625 (step 0)" in line(StepReport(1, [0.0, 1.0], StepAccounting()), 0.625)


def test_rewards_of_rollouts_that_continue_others_stand_beside_the_rest() -> None:
    branches = BranchUsage(rewards=[0.0, 1.0, 1.0, 0.0])
    assert "reward 1.000 sd 0.00  continued 0.500  " in line(StepReport(1, [1.0], StepAccounting(), branches=branches))
    assert "/9  continued 0.500  " in line(StepReport(1, [], StepAccounting(), branches=branches))
    assert "reward none sd 0.00" in line(StepReport(1, [], StepAccounting()))


def test_tokens_sampled_before_the_step_are_not_in_its_speed() -> None:
    report = StepReport(1, [1.0], StepAccounting(), started=100.0, sampling_s=2.0)
    report.count_tokens([call("earlier", 1000, started=90.0)], Publications(0, [0]))
    assert "1000 tokens  sampled before" in line(report)
    report.count_tokens([call("now", 10, started=101.0)], Publications(0, [0]))
    assert "1010 tokens  5 tok/s sampled" in line(report)


def test_a_terminal_shows_what_a_step_waits_for_from_its_start() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    display = ConsoleReport(console, 9)
    display.progress(1, 0, 8, "rollouts")
    display.close()
    assert isinstance(console.file, io.StringIO)
    assert "step 1: 0 of 8 rollouts" in console.file.getvalue()
