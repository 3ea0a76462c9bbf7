"""Read queries. Each runs in one transaction and so sees one consistent state."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, func, select

from leyden.api.wire import ListedRollout, RolloutDetail, RolloutPage, RunSummary
from leyden.episodes import Episode
from leyden.records import Attempt, Call, CallCredit, Event, EventKind, Group, Metric, Run, StepCredits, Version, Worker
from leyden.store.codec import decode_json
from leyden.store.errors import NotFound
from leyden.store.mapping import (
    attempt_from_row,
    call_from_row,
    credit_from_row,
    decode_reward,
    decode_span,
    group_from_row,
    listed_rollout_from_row,
    rollout_from_row,
    run_from_row,
    task_from_row,
)
from leyden.store.schema import (
    ACTIVE,
    LAST_ATTEMPT,
    QUEUED,
    WHOLE_CALLS,
    attempts,
    calls,
    credits,
    deleted_responses,
    events,
    groups,
    metrics,
    rewards,
    rollouts,
    runs,
    scorings,
    spans,
    tasks,
    versions,
    workers,
)

T = TypeVar("T")

_ROLLOUTS_AND_TASKS = select(rollouts, tasks.c.input).join(
    tasks, (tasks.c.run_id == rollouts.c.run_id) & (tasks.c.id == rollouts.c.task_id)
)


def list_run_ids(connection: Connection, only: str | None = None) -> Sequence[str]:
    """List the ids of the runs, oldest first, or of one if it exists."""
    query = select(runs.c.id).where(runs.c.state == "open").order_by(runs.c.created)
    return connection.scalars(query if only is None else query.where(runs.c.id == only)).all()


def get_run(connection: Connection, run: str) -> Run:
    """Return a run."""
    row = connection.execute(select(runs).where(runs.c.id == run, runs.c.state == "open")).first()
    if row is None:
        raise NotFound(f"no run {run!r}")
    return run_from_row(row)


def configuration(connection: Connection, run: str) -> dict[str, Any]:
    """Return the document that a run was configured with; empty if it has none, or is none of a training."""
    config = decode_json(connection.scalar(select(runs.c.config).where(runs.c.id == run)) or b"null")
    return config if isinstance(config, dict) else {}


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of such a document; empty if it has none, since a program may have given any document."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def summarise_run(connection: Connection, run: str) -> RunSummary:
    """Count what a run holds."""
    found = get_run(connection, run)
    by_state = connection.execute(
        select(func.coalesce(rollouts.c.ending, rollouts.c.state), func.count())
        .where(rollouts.c.run_id == run)
        .group_by(func.coalesce(rollouts.c.ending, rollouts.c.state))
    )
    rollout_counts = {name: int(count) for name, count in by_state}
    created, finished = connection.execute(
        select(func.count(), func.count(groups.c.finished)).where(groups.c.run_id == run)
    ).one()
    ended = select(func.sum(attempts.c.calls), func.sum(attempts.c.tokens)).where(attempts.c.run_id == run)
    n_calls, n_tokens = connection.execute(ended).one()
    active = (
        select(func.count(), func.sum(calls.c.sampled))
        .join(attempts, attempts.c.id == calls.c.attempt_id)
        .where(attempts.c.run_id == run, ACTIVE)
    )
    active_calls, active_tokens = connection.execute(active).one()
    unscored = select(func.count()).where(scorings.c.run_id == run, scorings.c.ready.is_not(None))
    mean = select(func.avg(rollouts.c.reward)).where(rollouts.c.run_id == run)
    return RunSummary(
        id=run,
        created=found.created,
        rollouts=rollout_counts,
        groups=created,
        groups_finished=finished,
        calls=int(n_calls or 0) + active_calls,
        tokens=int(n_tokens or 0) + int(active_tokens or 0),
        mean_reward=connection.scalar(mean),
        groups_unscored=connection.scalar(unscored) or 0,
    )


def get_group(connection: Connection, run: str, group: str) -> Group:
    """Return a group."""
    row = connection.execute(select(groups).where(groups.c.id == group, groups.c.run_id == run)).first()
    if row is None:
        raise NotFound(f"no group {group!r} in run {run!r}")
    return group_from_row(row)


def group_episodes(connection: Connection, run: str, group: str) -> list[Episode]:
    """Return the episode of the latest attempt of each rollout of a group."""
    get_group(connection, run, group)
    latest = (
        select(attempts).join(rollouts, LAST_ATTEMPT).where(rollouts.c.group_id == group).order_by(rollouts.c.place)
    )
    return _episodes(connection, connection.execute(latest).all())


def list_rollouts(connection: Connection, run: str, page: RolloutPage) -> list[ListedRollout]:
    """List rollouts of a run in the order in which they were queued."""
    require_run(connection, run)
    query = select(rollouts).where(rollouts.c.run_id == run)
    if page.state is not None:
        query = query.where(rollouts.c.state == page.state)
    if page.after:
        start = connection.scalar(select(rollouts.c.seq).where(rollouts.c.id == page.after, rollouts.c.run_id == run))
        if start is None:
            raise NotFound(f"no rollout {page.after!r} in run {run!r}")
        query = query.where(rollouts.c.seq > start)
    rows = connection.execute(query.order_by(rollouts.c.seq).limit(page.limit))
    return [listed_rollout_from_row(row) for row in rows]


def get_rollout(connection: Connection, run: str, rollout: str) -> RolloutDetail:
    """Return a rollout with its task and attempts."""
    row = connection.execute(_ROLLOUTS_AND_TASKS.where(rollouts.c.id == rollout, rollouts.c.run_id == run)).first()
    if row is None:
        of_group = select(rollouts.c.id).where(rollouts.c.group_id == rollout, rollouts.c.run_id == run)
        first = connection.scalar(of_group.order_by(rollouts.c.seq))
        hint = "" if first is None else f"; that is a group, whose first rollout is {first}"
        raise NotFound(f"no rollout {rollout!r} in run {run!r}{hint}")
    tries = connection.execute(select(attempts).where(attempts.c.rollout_id == rollout).order_by(attempts.c.number))
    return RolloutDetail(rollout_from_row(row), task_from_row(row), tuple(map(attempt_from_row, tries)))


def get_episode(connection: Connection, run: str, attempt: str) -> Episode:
    """Return the episode of an attempt."""
    found = connection.execute(select(attempts).where(attempts.c.id == attempt, attempts.c.run_id == run)).first()
    if found is None:
        raise NotFound(f"no attempt {attempt!r} in run {run!r}")
    return _episodes(connection, [found])[0]


def response_chain(connection: Connection, run: str, attempt: str, call: str) -> list[Call]:
    """Return a call of an attempt after its ancestors, the oldest first; empty if its response was deleted."""
    made = select(calls.c.id, calls.c.parent).join(attempts, attempts.c.id == calls.c.attempt_id)
    deleted = select(deleted_responses.c.call_id).where(deleted_responses.c.attempt_id == attempt)
    chain = made.where(
        attempts.c.run_id == run, attempts.c.id == attempt, calls.c.id == call, calls.c.id.not_in(deleted)
    ).cte(recursive=True)
    parents = select(calls.c.id, calls.c.parent).where(calls.c.attempt_id == attempt, calls.c.id == chain.c.parent)
    chain = chain.union_all(parents)
    whole = WHOLE_CALLS.where(calls.c.attempt_id == attempt, calls.c.id.in_(select(chain.c.id)))
    return [call_from_row(row) for row in connection.execute(whole.order_by(calls.c.seq))]


def _episodes(connection: Connection, found: Sequence[Row[Any]]) -> list[Episode]:
    """Build the episodes of some attempts, with one query per table for all of them."""
    query = _ROLLOUTS_AND_TASKS.where(rollouts.c.id.in_([row.rollout_id for row in found]))
    details = {row.id: row for row in connection.execute(query)}

    def by_attempt(table: Table, query: Select[Any]) -> Mapping[str, Sequence[Row[Any]]]:
        rows = defaultdict(list)
        query = query.where(table.c.attempt_id.in_([row.id for row in found])).order_by(table.c.seq)
        for row in connection.execute(query):
            rows[row.attempt_id].append(row)
        return rows

    calls_of = by_attempt(calls, WHOLE_CALLS)
    spans_of, rewards_of = (by_attempt(table, select(table)) for table in (spans, rewards))
    return [
        Episode(
            rollout=rollout_from_row(details[row.rollout_id]),
            attempt=attempt_from_row(row),
            task=task_from_row(details[row.rollout_id]),
            calls=tuple(map(call_from_row, calls_of[row.id])),
            spans=tuple(decode_span(span.body) for span in spans_of[row.id]),
            rewards=tuple(decode_reward(reward.body) for reward in rewards_of[row.id]),
            output=(row.output or b"").decode(),
        )
        for row in found
    ]


def rollout_credits(connection: Connection, run: str, rollout: str) -> list[StepCredits]:
    """Return what training computed for each call of a rollout, by policy and step; calls are in recorded order."""
    get_rollout(connection, run, rollout)
    query = (
        select(credits)
        .join(attempts, attempts.c.id == credits.c.attempt_id)
        .outerjoin(calls, (calls.c.attempt_id == credits.c.attempt_id) & (calls.c.id == credits.c.call_id))
        .where(attempts.c.rollout_id == rollout)
        .order_by(credits.c.policy, credits.c.step, attempts.c.number, calls.c.seq)
    )
    found: dict[tuple[str, int], list[CallCredit]] = defaultdict(list)
    for row in connection.execute(query):
        found[row.policy, row.step].append(credit_from_row(row))
    return [StepCredits(step, tuple(some), policy) for (policy, step), some in found.items()]


def list_events(connection: Connection, run: str, *, after: int, kind: str, limit: int) -> list[Event]:
    """List a run's events after a cursor."""
    require_run(connection, run)
    query = select(events).where(events.c.run_id == run, events.c.seq > after)
    if kind:
        query = query.where(events.c.kind == kind)
    rows = connection.execute(query.order_by(events.c.seq).limit(limit))
    return [Event(row.seq, row.run_id, EventKind(row.kind), row.subject, row.at, decode_json(row.data)) for row in rows]


def list_metrics(connection: Connection, run: str, *, after: int, limit: int) -> list[tuple[int, Metric]]:
    """List a run's metrics after a cursor, each with its sequence number."""
    require_run(connection, run)
    query = select(metrics).where(metrics.c.run_id == run, metrics.c.seq > after)
    rows = connection.execute(query.order_by(metrics.c.seq).limit(limit))
    return [(row.seq, Metric(row.step, row.name, row.value, row.at, row.policy)) for row in rows]


def latest_versions(connection: Connection, run: str) -> list[Version]:
    """Return the newest published version of each policy."""
    require_run(connection, run)
    query = (
        select(versions.c.policy, func.max(versions.c.number).label("number"))
        .where(versions.c.run_id == run)
        .group_by(versions.c.policy)
        .order_by(versions.c.policy)
    )
    return [Version(row.policy, row.number) for row in connection.execute(query)]


def list_workers(connection: Connection) -> list[Worker]:
    """List the workers, most recently seen first."""
    active = select(attempts.c.worker, func.count().label("alive")).where(ACTIVE).group_by(attempts.c.worker).subquery()
    query = (
        select(workers, func.coalesce(active.c.alive, 0).label("alive"))
        .outerjoin(active, active.c.worker == workers.c.id)
        .order_by(workers.c.seen.desc())
        .limit(1000)
    )
    return [Worker(row.id, row.seen, row.alive) for row in connection.execute(query)]


def active_attempts(connection: Connection) -> list[Attempt]:
    """List the attempts that have not ended."""
    return [attempt_from_row(row) for row in connection.execute(select(attempts).where(ACTIVE))]


def next_expiry(connection: Connection) -> float | None:
    """Return when the next lease expires unless it is renewed."""
    queries = (select(func.min(attempts.c.expires)).where(ACTIVE), select(func.min(scorings.c.expires)))
    return min((found for query in queries if (found := connection.scalar(query)) is not None), default=None)


def delayed_retries(connection: Connection, now: float) -> list[tuple[str, float]]:
    """List the run and the earliest start of each rollout that waits for its retry."""
    query = select(rollouts.c.run_id, rollouts.c.not_before).where(QUEUED, rollouts.c.not_before > now)
    return [(row.run_id, row.not_before) for row in connection.execute(query)]


def require_run(connection: Connection, id: str) -> None:
    """Raise `NotFound` unless the run exists."""
    if not list_run_ids(connection, id):
        raise NotFound(f"no run {id!r}")


def distinct_values(
    connection: Connection, column: ColumnElement[T], *conditions: ColumnElement[bool], limit: int | None = None
) -> list[T]:
    """Return the values of a column in order, each by one step in an index and not from all rows that have it."""
    next_value = select(column).where(*conditions).order_by(column).limit(1)
    found = select(next_value.scalar_subquery().label("value")).cte("found", recursive=True)
    after = next_value.where(column > found.c.value).correlate(found).scalar_subquery()
    found = found.union_all(select(after).where(found.c.value.is_not(None)))
    return list(connection.scalars(select(found.c.value).where(found.c.value.is_not(None)).limit(limit)))
