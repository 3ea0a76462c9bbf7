"""Reads the rewards of evaluations by task, and compares two of the same tasks, in pairs."""

from collections import defaultdict

from sqlalchemy import Connection, select

from leyden.api.views import Comparison, Evaluation, EvaluationQuery
from leyden.estimates import compare
from leyden.records import Purpose
from leyden.store.errors import NotFound
from leyden.store.read.queries import require_run
from leyden.store.schema import rollouts


def read_evaluation(connection: Connection, run: str, query: EvaluationQuery) -> Evaluation:
    """Return the evaluation of a step of a run, by default the last one."""
    rewarded = rollouts.c.run_id == run, rollouts.c.purpose == Purpose.EVAL, rollouts.c.reward.is_not(None)
    steps = list(connection.scalars(select(rollouts.c.step).where(*rewarded).distinct()))
    if not steps:
        require_run(connection, run)
        raise NotFound(f"run {run!r} has no evaluation with a reward: train it with `held_out` tasks")
    step = query.step if query.step is not None else max(steps, key=lambda found: -1 if found is None else found)
    if step not in steps:
        known = ", ".join(str(found) for found in steps)
        raise NotFound(f"run {run!r} has no evaluation of step {step}; there are those of {known}")
    rewards: dict[str, list[float]] = defaultdict(list)
    of_step = rollouts.c.step.is_(None) if step is None else rollouts.c.step == step
    for task, reward in connection.execute(select(rollouts.c.task_id, rollouts.c.reward).where(*rewarded, of_step)):
        rewards[task].append(reward)
    return Evaluation(run, step, {task: tuple(given) for task, given in rewards.items()})


def compare_evaluations(first: Evaluation, second: Evaluation) -> Comparison:
    """Return the difference of two evaluations; they must have tasks in common."""
    result = compare(first.rewards, second.rewards)
    if result is None:
        raise NotFound(f"{first.name} and {second.name} have no task in common: evaluate them on the same tasks")
    return Comparison(first.name, second.name, result)
