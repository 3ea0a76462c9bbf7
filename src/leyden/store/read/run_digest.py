"""Counts and rewards of a run. Every page of a run needs some."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import sqrt
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection, func, select

from leyden.api.views import PointsQuery, RunRewards, StepRewards
from leyden.estimates import clustered_error
from leyden.records import Purpose
from leyden.store.schema import attempts, rollouts

_STEPLESS = (Purpose.EVAL, Purpose.DEV)
"""Purposes of rollouts that can be outside a training, without a step."""


class StepTotal(Struct, frozen=True):
    """The rewards of the rollouts of one step."""

    step: int
    count: int
    total: float
    squares: float
    complete: bool = True
    """Whether no rollout of the step is queued or running."""

    @property
    def mean(self) -> float:
        """The mean reward."""
        return self.total / self.count


class PointBins(Struct, frozen=True):
    """Joins neighbouring steps of a range into at most so many points."""

    first: int
    width: int

    @classmethod
    def of(cls, first: int, last: int, points: int) -> "PointBins":
        """Return the bins of the steps from the first to the last."""
        return cls(first, -(-(last - first + 1) // points))


class RunDigest(Struct, frozen=True):
    """Counts and rewards of a run."""

    states: dict[str, int]
    """Rollouts by state; finished ones by ending."""
    purposes: dict[str, int]
    trains_nothing: bool
    """Whether it is a run of `leyden eval` or `leyden dev`."""
    last_step: int | None
    calls: int
    tokens: int
    train: tuple[StepTotal, ...]
    """The totals of each step that has rewards, in order."""
    held_out: tuple[StepTotal, ...]
    """Of each evaluation; one outside a training is of step 0."""
    dev: tuple[StepTotal, ...]
    """Of all rollouts of `leyden dev`, as those of step 0."""
    errors: dict[int, float]
    """The standard error of each mean that the run is judged by; of training steps only of the last and the best."""

    def rewards(self, query: PointsQuery) -> RunRewards:
        """Return count, mean and deviation of the rewards by step; neighbouring steps are joined into points."""
        train, held_out = ([one for one in some if query.has(one.step)] for some in (self.train, self.held_out))
        bins = PointBins.of(train[0].step, train[-1].step, query.points) if train else PointBins(0, 1)
        train_errors = self.errors if bins.width == 1 and not self.held_out else {}
        return RunRewards(
            self._join_steps(train, bins, train_errors),
            self._join_steps(held_out, PointBins(0, 1), self.errors),  # evaluations are few
        )

    @property
    def measured(self) -> tuple[StepTotal, ...]:
        """The totals that the run is judged by: of the evaluations, without them of training, without that of `dev`."""
        return self.held_out or self.train or self.dev

    @staticmethod
    def _join_steps(
        steps: Sequence[StepTotal], bins: PointBins, errors: Mapping[int, float]
    ) -> tuple[StepRewards, ...]:
        joined: dict[int, list[StepTotal]] = defaultdict(list)
        for one in steps:
            joined[(one.step - bins.first) // bins.width].append(one)
        return tuple(_join(some, errors) for some in joined.values())


def digest_run(connection: Connection, run: str) -> RunDigest:
    """Read the totals of a run in one pass over an index; all of them are 0 if there is no such run."""
    columns = rollouts.c.purpose, rollouts.c.step, rollouts.c.state, rollouts.c.ending  # in the order of the index
    reward = rollouts.c.reward
    sums = func.count(), func.count(reward), func.sum(reward), func.sum(reward * reward)
    query = select(*columns, *sums).where(rollouts.c.run_id == run).group_by(*columns)
    states, purposes = Counter[str](), Counter[str]()
    rewards: dict[str, dict[int, StepTotal]] = defaultdict(dict)
    incomplete: set[tuple[str, int]] = set()
    steps: set[tuple[str, int | None]] = set()
    for purpose, step, state, ending, number, count, total, squares in connection.execute(query):
        steps.add((purpose, step))
        states[ending or state] += number
        purposes[purpose] += number
        if state in ("queued", "running"):
            incomplete.add((purpose, step or 0))
        if count and (step is not None or purpose in _STEPLESS):
            before = rewards[purpose].get(step or 0, StepTotal(step or 0, 0, 0.0, 0.0))
            rewards[purpose][step or 0] = StepTotal(
                before.step, before.count + count, before.total + total, before.squares + squares
            )
    train, held_out, dev = (
        tuple(
            replace(total, complete=(purpose, step) not in incomplete)
            for step, total in sorted(rewards[purpose].items())
        )
        for purpose in (Purpose.TRAIN, Purpose.EVAL, Purpose.DEV)
    )
    if train and not held_out:
        best = best_step(train)
        errors = _read_errors(connection, run, Purpose.TRAIN, {train[-1].step, *([best.step] if best else [])})
    else:
        errors = _read_errors(connection, run, Purpose.EVAL if held_out else Purpose.DEV)
    totals = select(func.sum(attempts.c.calls), func.sum(attempts.c.tokens)).where(attempts.c.run_id == run)
    calls, tokens = connection.execute(totals).one()
    return RunDigest(
        states=dict(states),
        purposes=dict(purposes),
        trains_nothing=any((purpose, None) in steps for purpose in _STEPLESS),
        last_step=max((step or 0 for _, step in steps), default=None),
        calls=int(calls or 0),
        tokens=int(tokens or 0),
        train=train,
        held_out=held_out,
        dev=dev,
        errors=errors,
    )


def _read_errors(
    connection: Connection, run: str, purpose: Purpose, steps: Collection[int] | None = None
) -> dict[int, float]:
    """Compute the standard errors of the means of some steps from the rewards by task; by default of all steps.

    Tasks are not in the index, so every rollout of these steps is read.
    """
    conditions = [rollouts.c.run_id == run, rollouts.c.purpose == purpose, rollouts.c.reward.is_not(None)]
    if steps is not None:
        conditions.append(rollouts.c.step.in_(steps))
    columns: tuple[Any, ...] = func.coalesce(rollouts.c.step, 0), rollouts.c.task_id
    query = select(*columns, func.count(), func.sum(rollouts.c.reward)).where(*conditions).group_by(*columns)
    totals: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row in connection.execute(query):
        totals[row[0]].append((row[2], row[3]))
    errors = {step: clustered_error(of_tasks) for step, of_tasks in totals.items()}
    return {step: error for step, error in errors.items() if error is not None}


def best_step(steps: Sequence[StepTotal]) -> StepTotal | None:
    """Return the complete step with the largest mean; of equal ones the later, as the trainer does."""
    return max((one for one in steps if one.complete), key=lambda one: (one.mean, one.step), default=None)


def _join(steps: Sequence[StepTotal], errors: Mapping[int, float]) -> StepRewards:
    count = sum(one.count for one in steps)
    mean = sum(one.total for one in steps) / count
    variance = max(0.0, sum(one.squares for one in steps) / count - mean * mean) * count / max(1, count - 1)
    step = steps[-1].step
    return StepRewards(step, count, mean, sqrt(variance), errors.get(step))
