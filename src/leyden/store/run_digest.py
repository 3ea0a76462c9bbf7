"""Totals of a run's rollouts by step and state, read in one pass over an index. Every page of a run needs some."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import sqrt

from msgspec import Struct
from sqlalchemy import Connection, func, select

from leyden.records import Purpose
from leyden.store.schema import attempts, rollouts
from leyden.views import RunRewards, StepRewards


class StepTotal(Struct, frozen=True):
    """The rewards of the rollouts of one step."""

    step: int
    count: int
    total: float
    squares: float


class RunDigest(Struct, frozen=True):
    """Counts and rewards of a run."""

    states: dict[str, int]
    """Rollouts by state; finished ones by ending."""
    purposes: dict[str, int]
    last_step: int | None
    calls: int
    tokens: int
    steps: dict[str, tuple[StepTotal, ...]]
    """By purpose, the totals of each step that has rewards, in order."""

    def rewards(self, points: int) -> RunRewards:
        """Return count, mean and deviation of the rewards by step; neighbouring steps are joined into `points`."""
        width = -(-((self.last_step or 0) + 1) // points)
        train, held_out = (self.steps.get(str(purpose), ()) for purpose in (Purpose.TRAIN, Purpose.EVAL))
        return RunRewards(_rewards(train, width), _rewards(held_out, 1))  # evaluations are few


def digest_run(connection: Connection, run: str) -> RunDigest:
    """Read the totals of a run; all of them are 0 where there is no such run."""
    columns = rollouts.c.purpose, rollouts.c.step, rollouts.c.state, rollouts.c.ending  # in the order of the index
    reward = rollouts.c.reward
    sums = func.count(), func.count(reward), func.sum(reward), func.sum(reward * reward)
    query = select(*columns, *sums).where(rollouts.c.run_id == run).group_by(*columns)
    states, purposes = Counter[str](), Counter[str]()
    steps: dict[str, dict[int, StepTotal]] = defaultdict(dict)
    for purpose, step, state, ending, rows, count, total, squares in connection.execute(query):
        states[ending or state] += rows
        purposes[purpose] += rows
        if step is None or not count:
            continue
        before = steps[purpose].get(step, StepTotal(step, 0, 0.0, 0.0))
        steps[purpose][step] = StepTotal(step, before.count + count, before.total + total, before.squares + squares)
    totals = select(func.sum(attempts.c.calls), func.sum(attempts.c.tokens)).where(attempts.c.run_id == run)
    calls, tokens = connection.execute(totals).one()
    return RunDigest(
        states=dict(states),
        purposes=dict(purposes),
        last_step=connection.scalar(select(func.max(rollouts.c.step)).where(rollouts.c.run_id == run)),
        calls=int(calls or 0),
        tokens=int(tokens or 0),
        steps={purpose: tuple(found[step] for step in sorted(found)) for purpose, found in steps.items()},
    )


def _rewards(steps: Sequence[StepTotal], width: int) -> tuple[StepRewards, ...]:
    joined: dict[int, list[StepTotal]] = defaultdict(list)
    for one in steps:
        joined[one.step // width].append(one)
    return tuple(map(_join, joined.values()))


def _join(steps: Sequence[StepTotal]) -> StepRewards:
    count = sum(one.count for one in steps)
    mean = sum(one.total for one in steps) / count
    variance = max(0.0, sum(one.squares for one in steps) / count - mean * mean) * count / max(1, count - 1)
    return StepRewards(steps[-1].step, count, mean, sqrt(variance))
