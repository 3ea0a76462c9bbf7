"""Compares two evaluations of the same tasks, in pairs."""

from pathlib import Path

from leyden.api.views import Comparison, Evaluation, EvaluationQuery
from leyden.config import ConfigError
from leyden.estimates import PairedDifference, compare
from leyden.runs.stored_runs import open_run


def compare_evaluations(first: Evaluation, second: Evaluation) -> Comparison:
    """Return the difference of two evaluations; they must have tasks in common."""
    result = compare(first.rewards, second.rewards)
    if result is None:
        raise ConfigError(f"{first.name} and {second.name} have no task in common: evaluate them on the same tasks")
    return Comparison(first.name, second.name, result)


async def compare_runs(
    home: Path, first: str, second: str, steps: tuple[int | None, int | None] = (None, None)
) -> PairedDifference:
    """Compare the last evaluations of two runs in a home folder, or those of the steps given."""
    found = []
    for run, step in zip((first, second), steps, strict=True):
        with open_run(home, run) as store:
            found.append(await store.read_evaluation(run, EvaluationQuery(step)))
    return compare_evaluations(*found).result
