"""Counts and rewards of a run, added up from its totals. Every page of a run needs some."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import sqrt

from msgspec import Struct
from sqlalchemy import Connection

from leyden.api.views import RunRewards, StepRewards
from leyden.records import Purpose
from leyden.store.read.run_totals import STEPLESS, RunTotals, StepKey, read_errors, read_totals


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

    def rewards(self, points: int) -> RunRewards:
        """Return count, mean and deviation of the rewards by step; neighbouring steps are joined into `points`."""
        width = -(-((self.last_step or 0) + 1) // points)
        train_errors = {} if self.held_out else self.errors
        train = self._join_steps(self.train, width, train_errors if width == 1 else {})
        return RunRewards(train, self._join_steps(self.held_out, 1, self.errors))  # evaluations are few

    @property
    def measured(self) -> tuple[StepTotal, ...]:
        """The totals that the run is judged by: of the evaluations, without them of training, without that of `dev`."""
        return self.held_out or self.train or self.dev

    @staticmethod
    def _join_steps(steps: Sequence[StepTotal], width: int, errors: Mapping[int, float]) -> tuple[StepRewards, ...]:
        joined: dict[int, list[StepTotal]] = defaultdict(list)
        for one in steps:
            joined[one.step // width].append(one)
        return tuple(_join(some, errors) for some in joined.values())


def digest_run(connection: Connection, run: str) -> RunDigest:
    """Read the totals of a run; all of them are 0 where there is no such run."""
    return follow_run(connection, run, None)[1]


def follow_run(connection: Connection, run: str, known: RunTotals | None) -> tuple[RunTotals, RunDigest]:
    """Read what has changed since totals that are known, or everything; return the totals too, for the next time."""
    found = read_totals(connection, run, known)
    return found, digest_totals(connection, found)


def digest_totals(connection: Connection, found: RunTotals) -> RunDigest:
    """Add up the steps. Errors of training steps are read: they are needed of two steps only."""
    states: dict[str, int] = defaultdict(int)
    purposes: dict[str, int] = defaultdict(int)
    rewards: dict[str, dict[int, StepTotal]] = defaultdict(dict)
    errors: dict[StepKey, float | None] = {}
    for (purpose, step), counts in found.steps.items():
        for state, number in counts.states.items():
            states[state] += number
            purposes[purpose] += number
        if counts.count and (step is not None or purpose in STEPLESS):
            rewards[purpose][step or 0] = StepTotal(step or 0, counts.count, counts.total, counts.squares)
            errors[purpose, step or 0] = counts.error
    train, held_out, dev = (
        tuple(rewards[purpose][step] for step in sorted(rewards[purpose]))
        for purpose in (Purpose.TRAIN, Purpose.EVAL, Purpose.DEV)
    )
    if train and not held_out:
        judged = read_errors(connection, found.run, Purpose.TRAIN, [train[-1].step, best_step(train).step])
    else:
        kind = Purpose.EVAL if held_out else Purpose.DEV
        judged = {key[1] or 0: error for key, error in errors.items() if key[0] == kind and error is not None}
    return RunDigest(
        states=dict(states),
        purposes=dict(purposes),
        trains_nothing=any((purpose, None) in found.steps for purpose in STEPLESS),
        last_step=max((step or 0 for _, step in found.steps), default=None),
        calls=found.calls,
        tokens=found.tokens,
        train=train,
        held_out=held_out,
        dev=dev,
        errors=judged,
    )


def best_step(steps: Sequence[StepTotal]) -> StepTotal:
    """Return the step with the largest mean; of equal ones the later, as the trainer does."""
    return max(steps, key=lambda one: (one.mean, one.step))


def _join(steps: Sequence[StepTotal], errors: Mapping[int, float]) -> StepRewards:
    count = sum(one.count for one in steps)
    mean = sum(one.total for one in steps) / count
    variance = max(0.0, sum(one.squares for one in steps) / count - mean * mean) * count / max(1, count - 1)
    step = steps[-1].step
    return StepRewards(step, count, mean, sqrt(variance), errors.get(step))
