"""Totals of a run's rollouts by purpose and step, and how they follow the events of a run that goes on.

The first reading takes one pass over an index. Later ones read only the steps that events since then are about.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, func, or_, select

from leyden.estimates import clustered_error
from leyden.records import EventKind, Purpose
from leyden.store.schema import attempts, events, rollouts, runs

_MOST_EVENTS = 20_000
"""After more events everything is read again."""
_IDS_PER_QUERY = 500


class StepCounts(Struct, frozen=True):
    """Totals of the rollouts of one purpose and step."""

    states: dict[str, int]
    """Rollouts by state; finished ones by ending."""
    count: int
    """Rollouts that have a reward."""
    total: float
    squares: float
    error: float | None = None
    """The standard error of the mean, clustered by task; not of training steps, which are many."""


STEPLESS = (Purpose.EVAL, Purpose.DEV)
"""Purposes of rollouts that can be outside a training, without a step."""
StepKey = tuple[str, int | None]
"""Purpose and step."""


class RunTotals(Struct, frozen=True):
    """The totals of a run by purpose and step, up to an event. They are kept while the run goes on."""

    run: str
    created: float | None
    last_event: int
    steps: dict[StepKey, StepCounts]
    calls: int
    tokens: int


def read_totals(connection: Connection, run: str, known: RunTotals | None = None) -> RunTotals:
    """Read the totals of a run. With `known`, only the steps with events since then are read.

    The connection must see one state of the database: what is added up must not be newer than the events.
    """
    created = connection.scalar(select(runs.c.created).where(runs.c.id == run))
    same = known is not None and known.created == created  # another run may have the name of a deleted one
    changes = _read_changes(connection, run, known.last_event) if known is not None and same else None
    if known is None or changes is None:
        last_event = connection.scalar(select(func.max(events.c.seq)).where(events.c.run_id == run)) or 0
        calls, tokens = _sum_attempts(connection, attempts.c.run_id == run)
        return RunTotals(run, created, last_event, _count_steps(connection, run), calls, tokens)
    steps = dict(known.steps)
    for key in changes.steps:
        steps |= _count_steps(connection, run, key)
    calls, tokens = known.calls, known.tokens
    for ids in _batches(changes.ended):
        more = _sum_attempts(connection, attempts.c.id.in_(ids))
        calls, tokens = calls + more[0], tokens + more[1]
    return RunTotals(run, created, changes.last_event, steps, calls, tokens)


class _Changes(Struct, frozen=True):
    """What events since a number are about."""

    last_event: int
    steps: set[StepKey]
    ended: tuple[str, ...]
    """Attempts that have ended."""


def _read_changes(connection: Connection, run: str, after: int) -> _Changes | None:
    """Read the steps that the events after a number changed; None where everything is to be read."""
    query = select(events.c.seq, events.c.kind, events.c.subject).where(events.c.run_id == run, events.c.seq > after)
    found = connection.execute(query.order_by(events.c.seq).limit(_MOST_EVENTS + 1)).all()
    if len(found) > _MOST_EVENTS:
        return None
    ended: list[str] = []
    rollout_ids, group_ids = set[str](), set[str]()
    for _, kind, subject in found:
        part = kind.partition(".")[0]
        if part == "rollout":
            rollout_ids.add(subject)
        elif part == "attempt":
            rollout_ids.add(subject.rpartition(".")[0])
        elif part in ("group", "scoring"):
            group_ids.add(subject)
        if kind == EventKind.ATTEMPT_ENDED:
            ended.append(subject)
    steps: set[StepKey] = set()
    for column, ids in ((rollouts.c.id, rollout_ids), (rollouts.c.group_id, group_ids)):
        for some in _batches(sorted(ids)):
            distinct = select(rollouts.c.purpose, rollouts.c.step).where(column.in_(some)).distinct()
            steps.update((purpose, step) for purpose, step in connection.execute(distinct))
    return _Changes(found[-1].seq if found else after, steps, tuple(ended))


def _count_steps(connection: Connection, run: str, only: StepKey | None = None) -> dict[StepKey, StepCounts]:
    """Count the rollouts of all steps, or of one."""
    conditions = [rollouts.c.run_id == run]
    if only is not None:
        conditions += [rollouts.c.purpose == only[0], rollouts.c.step == only[1]]
    columns = rollouts.c.purpose, rollouts.c.step, rollouts.c.state, rollouts.c.ending  # in the order of the index
    reward = rollouts.c.reward
    sums = func.count(), func.count(reward), func.sum(reward), func.sum(reward * reward)
    query = select(*columns, *sums).where(*conditions).group_by(*columns)
    found: dict[StepKey, StepCounts] = {}
    for purpose, step, state, ending, rows, count, total, squares in connection.execute(query):
        before = found.get((purpose, step), StepCounts({}, 0, 0.0, 0.0))
        found[purpose, step] = StepCounts(
            before.states | {ending or state: rows},
            before.count + count,
            before.total + (total or 0.0),
            before.squares + (squares or 0.0),
        )
    for purpose in STEPLESS:
        keys = [key for key in found if key[0] == purpose]
        errors = read_errors(connection, run, purpose, None if only is None else [only[1]]) if keys else {}
        for key in keys:
            found[key] = replace(found[key], error=errors.get(key[1] or 0))
    return found


def _sum_attempts(connection: Connection, condition: ColumnElement[bool]) -> tuple[int, int]:
    """Return calls and sampled tokens of attempts."""
    totals = select(func.sum(attempts.c.calls), func.sum(attempts.c.tokens)).where(condition)
    calls, tokens = connection.execute(totals).one()
    return int(calls or 0), int(tokens or 0)


def read_errors(
    connection: Connection, run: str, purpose: Purpose, steps: Sequence[int | None] | None = None
) -> dict[int, float]:
    """Compute the standard errors of the means of some steps from the rewards by task; by default of all steps.

    Tasks are not in the index, so every rollout of these steps is read.
    """
    conditions = [rollouts.c.run_id == run, rollouts.c.purpose == purpose, rollouts.c.reward.is_not(None)]
    if steps is not None:
        conditions.append(or_(*(rollouts.c.step == step for step in steps)))
    columns: tuple[Any, ...] = func.coalesce(rollouts.c.step, 0), rollouts.c.task_id
    query = select(*columns, func.count(), func.sum(rollouts.c.reward)).where(*conditions).group_by(*columns)
    totals: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row in connection.execute(query):
        totals[row[0]].append((row[2], row[3]))
    errors = {step: clustered_error(of_tasks) for step, of_tasks in totals.items()}
    return {step: error for step, error in errors.items() if error is not None}


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[start : start + _IDS_PER_QUERY] for start in range(0, len(ids), _IDS_PER_QUERY))
