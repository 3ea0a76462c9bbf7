"""Totals of a run's rollouts by step and state, read in one pass over an index. Every page of a run needs some."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from msgspec import Struct
from sqlalchemy import Connection, func, select

from leyden.estimates import clustered_error
from leyden.records import Purpose
from leyden.store.schema import attempts, rollouts
from leyden.views import RunRewards, StepRewards


class StepTotal(Struct, frozen=True):
    """The rewards of the rollouts of one step."""

    step: int
    count: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        """The mean reward."""
        return self.total / self.count


class RunDigest(Struct, frozen=True):
    """Counts and rewards of a run."""

    states: dict[str, int]
    """Rollouts by state; finished ones by ending."""
    purposes: dict[str, int]
    evaluation: bool
    """Whether it is an evaluation outside a training: `leyden eval`."""
    last_step: int | None
    calls: int
    tokens: int
    train: tuple[StepTotal, ...]
    """The totals of each step that has rewards, in order."""
    held_out: tuple[StepTotal, ...]
    """Of each evaluation; one outside a training is of step 0."""
    errors: dict[int, float]
    """The standard error of each mean of `held_out`; without evaluations, of the last and of the best step."""

    def rewards(self, points: int) -> RunRewards:
        """Return count, mean and deviation of the rewards by step; neighbouring steps are joined into `points`."""
        width = -(-((self.last_step or 0) + 1) // points)
        train_errors = {} if self.held_out else self.errors
        train = self._join_steps(self.train, width, train_errors if width == 1 else {})
        return RunRewards(train, self._join_steps(self.held_out, 1, self.errors))  # evaluations are few

    @property
    def measured(self) -> tuple[StepTotal, ...]:
        """The totals that the run is judged by: of the evaluations, or of training where there are none."""
        return self.held_out or self.train

    @staticmethod
    def _join_steps(steps: Sequence[StepTotal], width: int, errors: Mapping[int, float]) -> tuple[StepRewards, ...]:
        joined: dict[int, list[StepTotal]] = defaultdict(list)
        for one in steps:
            joined[one.step // width].append(one)
        return tuple(_join(some, errors) for some in joined.values())


def digest_run(connection: Connection, run: str) -> RunDigest:
    """Read the totals of a run; all of them are 0 where there is no such run."""
    columns = rollouts.c.purpose, rollouts.c.step, rollouts.c.state, rollouts.c.ending  # in the order of the index
    reward = rollouts.c.reward
    sums = func.count(), func.count(reward), func.sum(reward), func.sum(reward * reward)
    query = select(*columns, *sums).where(rollouts.c.run_id == run).group_by(*columns)
    states, purposes = Counter[str](), Counter[str]()
    last_step: int | None = None
    evaluation = False
    steps: dict[str, dict[int, StepTotal]] = defaultdict(dict)
    for purpose, step, state, ending, rows, count, total, squares in connection.execute(query):
        states[ending or state] += rows
        last_step = step if last_step is None else max(last_step, step or 0)
        purposes[purpose] += rows
        if step is None and purpose == Purpose.EVAL:
            step, evaluation = 0, True
        if step is None or not count:
            continue
        before = steps[purpose].get(step, StepTotal(step, 0, 0.0, 0.0))
        steps[purpose][step] = StepTotal(step, before.count + count, before.total + total, before.squares + squares)
    totals = select(func.sum(attempts.c.calls), func.sum(attempts.c.tokens)).where(attempts.c.run_id == run)
    calls, tokens = connection.execute(totals).one()
    train, held_out = (
        tuple(steps[purpose][step] for step in sorted(steps[purpose])) for purpose in (Purpose.TRAIN, Purpose.EVAL)
    )
    return RunDigest(
        states=dict(states),
        purposes=dict(purposes),
        evaluation=evaluation,
        last_step=last_step,
        calls=int(calls or 0),
        tokens=int(tokens or 0),
        train=train,
        held_out=held_out,
        errors=_clustered_errors(connection, run, train, held_out),
    )


def best_step(steps: Sequence[StepTotal]) -> StepTotal:
    """Return the step with the largest mean; of equal ones the later, as the trainer does."""
    return max(steps, key=lambda one: (one.mean, one.step))


def _clustered_errors(
    connection: Connection, run: str, train: Sequence[StepTotal], held_out: Sequence[StepTotal]
) -> dict[int, float]:
    """Compute errors from the rewards by task. Tasks are not in the index, so of training only two steps are read."""
    conditions = [rollouts.c.run_id == run, rollouts.c.reward.is_not(None)]
    if held_out:
        conditions.append(rollouts.c.purpose == Purpose.EVAL)
    elif train:
        steps = {train[-1].step, best_step(train).step}
        conditions += [rollouts.c.purpose == Purpose.TRAIN, rollouts.c.step.in_(steps)]
    else:
        return {}
    columns: tuple[Any, ...] = func.coalesce(rollouts.c.step, 0), rollouts.c.task_id
    query = select(*columns, func.count(), func.sum(rollouts.c.reward)).where(*conditions).group_by(*columns)
    totals: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row in connection.execute(query):
        totals[row[0]].append((row[2], row[3]))
    errors = {step: clustered_error(of_tasks) for step, of_tasks in totals.items()}
    return {step: error for step, error in errors.items() if error is not None}


def _join(steps: Sequence[StepTotal], errors: Mapping[int, float]) -> StepRewards:
    count = sum(one.count for one in steps)
    mean = sum(one.total for one in steps) / count
    variance = max(0.0, sum(one.squares for one in steps) / count - mean * mean) * count / max(1, count - 1)
    step = steps[-1].step
    return StepRewards(step, count, mean, sqrt(variance), errors.get(step))
