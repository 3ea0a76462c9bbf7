"""Compares the evaluations of two runs in a home folder."""

from pathlib import Path

from leyden.api.views import EvaluationQuery
from leyden.estimates import PairedDifference
from leyden.runs.stored_runs import open_run
from leyden.store.read.evaluations import compare_evaluations


async def compare_runs(
    home: Path, first: str, second: str, steps: tuple[int | None, int | None] = (None, None)
) -> PairedDifference:
    """Compare the last evaluations of two runs in a home folder, or those of the steps given."""
    found = []
    for run, step in zip((first, second), steps, strict=True):
        with open_run(home, run) as store:
            found.append(await store.read_evaluation(run, EvaluationQuery(step)))
    return compare_evaluations(*found).result
