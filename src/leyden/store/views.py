"""Queries of the dashboard. They read indexes and single pages, so large rollouts cost no more than small ones."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any, Literal

from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, and_, exists, func, or_, select

from leyden.outcomes import Ending
from leyden.records import DEFAULT_POLICY
from leyden.store.codec import decode_json
from leyden.store.errors import NotFound
from leyden.store.mapping import listed_rollout_from_row
from leyden.store.queries import require_run
from leyden.store.run_digest import RunDigest, digest_run
from leyden.store.schema import ACTIVE, QUEUED, attempts, events, metrics, roles, rollouts, runs, versions, workers
from leyden.views import (
    MAX_LEASES,
    Facets,
    Failure,
    Failures,
    Fleet,
    LeaseView,
    RolloutListing,
    RolloutQuery,
    RunCard,
    Series,
    StepRewards,
    WorkerView,
)
from leyden.wire import ListedRollout

_CARD_POINTS = 60
_IDLE_AFTER_S = 120.0
_FAILURES_EXAMINED = 20_000
_RECENT_S = 600.0
_MAX_ROLES = 100
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)?")
"""Parts of a message that differ between failures of the same kind: numbers, addresses and ids."""


def read_series(connection: Connection, run: str, names: Sequence[str], points: int) -> dict[str, Series]:
    """Return metrics of the policy that a run trains, each with at most so many points.

    A name that ends in * selects by prefix.
    """
    last = connection.scalar(select(func.max(metrics.c.step)).where(metrics.c.run_id == run))
    if last is None:
        require_run(connection, run)
        return {}
    width = -(-(last + 1) // points)
    value = metrics.c.value
    columns = [metrics.c.name, func.max(metrics.c.step), func.avg(value)]
    if width > 1:
        columns += [func.min(value), func.max(value)]
    query = select(*columns).where(metrics.c.run_id == run, metrics.c.policy == trained_policy(connection, run))
    if names:
        query = query.where(or_(*map(_named, names)))
    query = query.group_by(metrics.c.name, metrics.c.step // width if width > 1 else metrics.c.step)
    found: dict[str, list[Any]] = defaultdict(list)
    for name, *point in connection.execute(query.order_by(metrics.c.name, func.max(metrics.c.step))):
        found[name].append(point)
    return {name: Series(*map(tuple, zip(*rows, strict=True))) for name, rows in found.items()}


def trained_policy(connection: Connection, run: str) -> str:
    """Return the name of the policy that a run trains; a configuration that names none trains the default policy."""
    config = decode_json(connection.scalar(select(runs.c.config).where(runs.c.id == run)) or b"null")
    name = config.get("policy") if isinstance(config, dict) else None
    return name if isinstance(name, str) else DEFAULT_POLICY


def _named(name: str) -> ColumnElement[bool]:
    if not name.endswith("*"):
        return metrics.c.name == name
    prefix = name[:-1]
    return and_(metrics.c.name >= prefix, metrics.c.name < prefix + "\U0010ffff")


def open_runs(connection: Connection, only: str | None = None) -> list[str]:
    """Return the ids of all runs, newest first, or of one if it exists."""
    query = select(runs.c.id).where(runs.c.state == "open")
    if only is not None:
        query = query.where(runs.c.id == only)
    return list(connection.scalars(query.order_by(runs.c.created.desc())))


class NewestEvent(Struct, frozen=True):
    """The number of the newest event and when it happened; both 0 where there is none."""

    seq: int
    at: float


def newest_event(connection: Connection, run: str | None = None) -> NewestEvent:
    """Return the newest event of a run, or of all runs."""
    query = select(events.c.seq, events.c.at).order_by(events.c.seq.desc()).limit(1)
    row = connection.execute(query if run is None else query.where(events.c.run_id == run)).first()
    return NewestEvent(row.seq, row.at) if row is not None else NewestEvent(0, 0.0)


def last_event_before(connection: Connection, moment: float) -> int:
    """Return the number of the newest event before a moment; 0 where there is none."""
    query = select(events.c.seq).where(events.c.at < moment).order_by(events.c.seq.desc()).limit(1)
    return connection.scalar(query) or 0


def count_events(connection: Connection, after: int) -> tuple[int, dict[tuple[str, str], int]]:
    """Count the events after a number by run and kind; return the newest number with the counts."""
    query = select(events.c.run_id, events.c.kind, func.count(), func.max(events.c.seq)).where(events.c.seq > after)
    found = connection.execute(query.group_by(events.c.run_id, events.c.kind)).all()
    return max((row[3] for row in found), default=after), {(run, kind): count for run, kind, count, _ in found}


def run_card(connection: Connection, run: str, now: float, digest: RunDigest | None = None) -> RunCard:
    """Return state, step and rewards of a run; `digest` saves reading its totals again."""
    row = connection.execute(
        select(runs.c.created, runs.c.config).where(runs.c.id == run, runs.c.state == "open")
    ).first()
    if row is None:
        raise NotFound(f"no run {run!r}")
    digest = digest or digest_run(connection, run)
    last_event = newest_event(connection, run).at or row.created
    config = decode_json(row.config)
    config = config if isinstance(config, dict) else {}
    steps = (config.get("training") or {}).get("steps") if isinstance(config.get("training"), dict) else None
    step = connection.scalar(select(func.max(metrics.c.step)).where(metrics.c.run_id == run)) or 0
    rewards, joined = digest.rewards(sys.maxsize), digest.rewards(_CARD_POINTS)
    measured = rewards.held_out or rewards.train
    best = max(measured, key=lambda one: (one.mean, one.step), default=None)
    now_at = measured[-1] if measured else None
    active = digest.states.get("running", 0) + digest.states.get("queued", 0) > 0
    state: Literal["running", "finished", "idle"]
    if steps is not None and step >= steps and not active:
        state = "finished"
    else:
        state = "running" if now - last_event < _IDLE_AFTER_S else "idle"
    errors = _clustered_errors(connection, run) if rewards.held_out else {}
    return RunCard(
        id=run,
        created=row.created,
        last_event=last_event,
        state=state,
        model=config.get("model") if isinstance(config.get("model"), str) else None,
        step=step,
        steps=steps if isinstance(steps, int) else None,
        rollouts=digest.states,
        calls=digest.calls,
        tokens=digest.tokens,
        held_out=bool(rewards.held_out),
        reward=now_at.mean if now_at else None,
        error=_error(now_at, errors),
        counted=now_at.count if now_at else 0,
        best=best.mean if best else None,
        best_error=_error(best, errors),
        best_step=best.step if best else None,
        curve=_curve(joined.held_out or joined.train),
    )


def _curve(rewards: Sequence[StepRewards]) -> Series:
    return Series(tuple(one.step for one in rewards), tuple(one.mean for one in rewards))


def _clustered_errors(connection: Connection, run: str) -> dict[int, float]:
    """Return the standard errors of evaluations by step, which the trainer computes from the spread between tasks."""
    query = select(metrics.c.step, metrics.c.value).where(
        metrics.c.run_id == run,
        metrics.c.policy == trained_policy(connection, run),
        metrics.c.name == "held_out/error",
    )
    return {row.step: row.value for row in connection.execute(query)}


def _error(rewards: StepRewards | None, clustered: Mapping[int, float]) -> float | None:
    """Return the standard error of a mean."""
    if rewards is None or rewards.count < 2:
        return None
    return clustered.get(rewards.step, rewards.deviation / sqrt(rewards.count))


def _has_role(run: str, role: str) -> ColumnElement[bool]:
    same = roles.c.run_id == run, roles.c.role == role.encode(errors="replace"), roles.c.rollout_id == rollouts.c.id
    return exists(select(roles.c.role).where(*same))


_SORTS: dict[str, tuple[ColumnElement[Any], ...]] = {
    "newest": (rollouts.c.seq.desc(),),
    "oldest": (rollouts.c.seq,),
    **{name: (rollouts.c[name].is_(None), rollouts.c[name], rollouts.c.seq) for name in ("reward", "tokens", "calls")},
    **{
        f"-{name}": (rollouts.c[name].is_(None), rollouts.c[name].desc(), rollouts.c.seq)
        for name in ("reward", "tokens", "calls")
    },
    "step": (rollouts.c.step.is_(None), rollouts.c.step, rollouts.c.seq),
    "-step": (rollouts.c.step.is_(None), rollouts.c.step.desc(), rollouts.c.seq.desc()),
}


def search_rollouts(connection: Connection, run: str, query: RolloutQuery) -> RolloutListing:
    """Return one page of the rollouts that match a query, and how many match."""
    require_run(connection, run)
    conditions = _conditions(run, query)
    if query.message:
        conditions = [rollouts.c.seq.in_(_with_message(connection, run, conditions, query.message))]
    count = select(func.count()).select_from(rollouts).where(*conditions)
    # Pages are found in the index alone, and only their rows are read. A filter is applied once, to page and count.
    counted = func.count().over() if len(conditions) > 1 else count.scalar_subquery()
    page = select(rollouts.c.seq, counted).where(*conditions).order_by(*_SORTS[query.sort])
    found = connection.execute(page.limit(query.limit).offset(query.offset)).all()
    total = found[0][1] if found else connection.scalar(count) or 0
    seqs = [seq for seq, _ in found]
    rows = {row.seq: row for row in connection.execute(select(rollouts).where(rollouts.c.seq.in_(seqs)))}
    return RolloutListing(tuple(listed_rollout_from_row(rows[seq]) for seq in seqs), total)


def _conditions(run: str, query: RolloutQuery) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = [rollouts.c.run_id == run]
    if query.purpose is not None:
        found.append(rollouts.c.purpose == str(query.purpose))
    if query.ending:
        found.append(func.coalesce(rollouts.c.ending, rollouts.c.state).in_(query.ending.split(",")))
    if query.role:
        found.append(_has_role(run, query.role))
    if query.task:
        found.append(rollouts.c.task_id == query.task)
    if query.reward_below is not None:
        found.append(rollouts.c.reward < query.reward_below)
    for column, low, high in (
        (rollouts.c.step, query.step_from, query.step_to),
        (rollouts.c.reward, query.reward_from, query.reward_to),
        (rollouts.c.tokens, query.tokens_from, query.tokens_to),
    ):
        if low is not None:
            found.append(column >= low)
        if high is not None:
            found.append(column <= high)
    return found


def _with_message(
    connection: Connection, run: str, conditions: Sequence[ColumnElement[bool]], message: str
) -> list[int]:
    query = select(rollouts.c.seq, rollouts.c.message).where(*conditions, _FAILED).order_by(rollouts.c.seq.desc())
    rows = connection.execute(query.limit(_FAILURES_EXAMINED))
    return [row.seq for row in rows if general_message(row.message) == message]


_FAILED = rollouts.c.ending.is_not(None) & (rollouts.c.ending != str(Ending.SUCCEEDED))


def failures(connection: Connection, run: str) -> Failures:
    """Group failed rollouts by ending and message; reads the newest ones only."""
    require_run(connection, run)
    conditions = [rollouts.c.run_id == run, _FAILED]
    query = select(rollouts.c.id, rollouts.c.ending, rollouts.c.message).where(*conditions)
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for row in connection.execute(query.order_by(rollouts.c.seq.desc()).limit(_FAILURES_EXAMINED)):
        key = row.ending, general_message(row.message)
        counts[key] += 1
        examples.setdefault(key, row.id)
    total = connection.scalar(select(func.count()).select_from(rollouts).where(*conditions)) or 0
    groups = (Failure(*key, count, examples[key]) for key, count in counts.most_common(200))
    return Failures(tuple(groups), counts.total(), total)


def general_message(message: bytes | None) -> str:
    """Return the first line of a message, with numbers and ids replaced by #."""
    first = (message or b"").decode(errors="replace").strip().partition("\n")[0]
    return _VARIABLE.sub("#", first)[:500]


def facets(connection: Connection, run: str, digest: RunDigest) -> Facets:
    """Return the values by which a run's rollouts can be filtered."""
    require_run(connection, run)
    return Facets(digest.states, digest.purposes, tuple(sorted(_role_names(connection, run))), digest.last_step)


def _role_names(connection: Connection, run: str) -> Iterator[str]:
    """Yield the roles of a run, at most 100, each by one step in the index and not from the rows of its rollouts."""
    last = b""
    for _ in range(_MAX_ROLES):
        after = select(roles.c.role).where(roles.c.run_id == run, roles.c.role > last)
        found = connection.scalar(after.order_by(roles.c.role).limit(1))
        if found is None:
            return
        last = bytes(found)
        yield last.decode(errors="replace")


def group_rollouts(connection: Connection, run: str, group: str) -> list[ListedRollout]:
    """Return the rollouts of a group in order."""
    query = select(rollouts).where(rollouts.c.group_id == group, rollouts.c.run_id == run).order_by(rollouts.c.place)
    return [listed_rollout_from_row(row) for row in connection.execute(query)]


def read_fleet(connection: Connection, now: float) -> Fleet:
    """Return workers, active attempts and the queue; a server adds its engines."""
    queued, delayed = count_queue(connection, now)
    ended, tokens = recent_throughput(connection, now)
    return Fleet(
        now=now,
        workers=tuple(list_workers(connection, now)),
        leases=tuple(list_leases(connection)),
        engines=(),
        queued=queued,
        delayed=delayed,
        running=connection.scalar(select(func.count()).select_from(attempts).where(ACTIVE)) or 0,
        ended=ended,
        tokens=tokens,
        refused={},
    )


def list_workers(connection: Connection, now: float) -> list[WorkerView]:
    """Return the workers seen in the last day, and how their attempts ended recently."""
    active = {
        row.worker: row
        for row in connection.execute(
            select(attempts.c.worker, func.count().label("leases"), func.min(attempts.c.started).label("oldest"))
            .where(ACTIVE)
            .group_by(attempts.c.worker)
        )
    }
    ended: dict[str, dict[str, int]] = defaultdict(dict)
    for row in _recent(connection, now, attempts.c.worker, attempts.c.ending, func.count()):
        ended[row[0]][row[1]] = int(row[2])
    query = select(workers).where(workers.c.seen > now - 86_400).order_by(workers.c.seen.desc()).limit(500)
    return [
        WorkerView(
            id=row.id,
            seen=row.seen,
            leases=active[row.id].leases if row.id in active else 0,
            oldest=active[row.id].oldest if row.id in active else None,
            ended=ended.get(row.id, {}),
        )
        for row in connection.execute(query)
    ]


def recent_throughput(connection: Connection, now: float) -> tuple[int, int]:
    """Return how many attempts ended in the last ten minutes, and how many tokens they sampled."""
    query = select(func.count(), func.sum(attempts.c.tokens)).where(attempts.c.ended > now - _RECENT_S)
    count, tokens = connection.execute(query).one()
    return int(count), int(tokens or 0)


def _recent(connection: Connection, now: float, *columns: Any) -> Sequence[Any]:
    *by, _ = columns
    return connection.execute(select(*columns).where(attempts.c.ended > now - _RECENT_S).group_by(*by)).all()


def list_leases(connection: Connection) -> list[LeaseView]:
    """Return active attempts, the oldest first."""
    query = (
        select(attempts, rollouts.c.purpose)
        .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .where(ACTIVE)
        .order_by(attempts.c.started)
        .limit(MAX_LEASES)
    )
    return [
        LeaseView(row.run_id, row.rollout_id, row.id, row.worker, row.started, row.purpose)
        for row in connection.execute(query)
    ]


def count_queue(connection: Connection, now: float) -> tuple[int, int]:
    """Return how many rollouts are queued, and how many of them wait for their retry."""
    queued = connection.scalar(select(func.count()).select_from(rollouts).where(QUEUED)) or 0
    delayed = select(func.count()).select_from(rollouts).where(QUEUED, rollouts.c.not_before > now)
    return queued, connection.scalar(delayed) or 0


def newest_versions(connection: Connection) -> dict[str, int]:
    """Return the newest version of each policy, over all runs."""
    query = select(versions.c.policy, func.max(versions.c.number)).group_by(versions.c.policy)
    return {policy: int(number) for policy, number in connection.execute(query)}


def version_at(connection: Connection, run: str, moment: float | None) -> int | None:
    """Return the newest version of a run's weights that was published by a moment; None: by now."""
    query = select(func.max(versions.c.number)).where(versions.c.run_id == run)
    found: int | None = connection.scalar(query if moment is None else query.where(versions.c.at <= moment))
    return found
