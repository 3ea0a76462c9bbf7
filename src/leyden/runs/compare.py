"""Compares two evaluations of the same tasks, in pairs."""

from collections import defaultdict
from pathlib import Path

from msgspec import Struct

from leyden.api.wire import RolloutPage
from leyden.config import ConfigError
from leyden.estimates import PairedDifference, TaskRewards, compare
from leyden.records import Purpose
from leyden.runs.stored_runs import RunSource, open_run

_PAGE = 1000
_EVALUATION = "eval-"
"""How the names of groups of evaluations begin; groups of test tasks are called `test-STEP-TASK`."""


class Evaluation(Struct, frozen=True):
    """One evaluation of a run."""

    run: str
    step: int | None
    """None for a run of `leyden eval`, which has no steps."""
    rewards: TaskRewards

    @property
    def name(self) -> str:
        """The run, and the step if it has one."""
        return self.run if self.step is None else f"{self.run} at step {self.step}"


async def read_evaluation(source: RunSource, run: str, step: int | None) -> Evaluation:
    """Read the rewards of an evaluation of a run; by default the last one."""
    evaluations: dict[int | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    after = ""
    while page := await source.list_rollouts(run, RolloutPage(after, _PAGE)):
        for rollout in page:
            held_out = rollout.purpose is Purpose.EVAL and rollout.group.startswith(_EVALUATION)
            if held_out and rollout.reward is not None:
                evaluations[rollout.step][rollout.task].append(rollout.reward)
        after = page[-1].id
    if not evaluations:
        raise ConfigError(f"run {run!r} has no evaluation with a reward: train it with `held_out` tasks")
    if step is None:
        step = max(evaluations, key=lambda found: -1 if found is None else found)
    if step not in evaluations:
        known = ", ".join(str(found) for found in evaluations)
        raise ConfigError(f"run {run!r} has no evaluation of step {step}; there are those of {known}")
    return Evaluation(run, step, evaluations[step])


def compare_evaluations(first: Evaluation, second: Evaluation) -> PairedDifference:
    """Return the difference of two evaluations; they must have tasks in common."""
    result = compare(first.rewards, second.rewards)
    if result is None:
        raise ConfigError(f"{first.name} and {second.name} have no task in common: evaluate them on the same tasks")
    return result


async def compare_runs(
    home: Path, first: str, second: str, steps: tuple[int | None, int | None] = (None, None)
) -> PairedDifference:
    """Compare the last evaluations of two runs in a home folder, or those of the steps given."""
    found = []
    for run, step in zip((first, second), steps, strict=True):
        with open_run(home, run) as store:
            found.append(await read_evaluation(store, run, step))
    return compare_evaluations(*found)
