"""Queries of the dashboard. They read indexes and single pages, so large rollouts cost no more than small ones."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import sqrt
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, func, or_, select

from leyden.outcomes import Ending
from leyden.records import Purpose
from leyden.store.codec import decode_json
from leyden.store.errors import NotFound
from leyden.store.mapping import listed_rollout_from_row
from leyden.store.schema import ACTIVE, QUEUED, attempts, events, metrics, roles, rollouts, runs, versions, workers
from leyden.views import (
    Facets,
    Failure,
    Failures,
    LeaseView,
    RolloutListing,
    RolloutQuery,
    RunCard,
    RunRewards,
    Series,
    StepRewards,
    WorkerView,
)
from leyden.wire import ListedRollout

_CARD_POINTS = 60
_IDLE_AFTER_S = 120.0
_FAILURES_EXAMINED = 20_000
_RECENT_S = 600.0
_MAX_LEASES = 200
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)?")
"""Parts of a message that differ between failures of the same kind: numbers, addresses and ids."""


def read_series(connection: Connection, run: str, names: Sequence[str], points: int) -> dict[str, Series]:
    """Return metrics by name, each with at most so many points; a name that ends in * selects by prefix."""
    last = connection.scalar(select(func.max(metrics.c.step)).where(metrics.c.run_id == run))
    if last is None:
        require_run(connection, run)
        return {}
    width = -(-(last + 1) // points)
    value, bucket = metrics.c.value, metrics.c.step / width if width == 1 else metrics.c.step // width
    columns = [metrics.c.name, func.max(metrics.c.step), func.avg(value)]
    if width > 1:
        columns += [func.min(value), func.max(value)]
    query = select(*columns).where(metrics.c.run_id == run)
    if names:
        query = query.where(or_(*map(_named, names)))
    query = query.group_by(metrics.c.name, bucket if width > 1 else metrics.c.step)
    found: dict[str, list[Any]] = defaultdict(list)
    for name, *point in connection.execute(query.order_by(metrics.c.name, func.max(metrics.c.step))):
        found[name].append(point)
    return {name: Series(*map(tuple, zip(*rows, strict=True))) for name, rows in found.items()}


def _named(name: str) -> ColumnElement[bool]:
    if not name.endswith("*"):
        return metrics.c.name == name
    prefix = name[:-1]
    return and_(metrics.c.name >= prefix, metrics.c.name < prefix + "\U0010ffff")


def run_cards(connection: Connection, only: str | None, now: float) -> list[RunCard]:
    """Return the runs, newest first."""
    query = select(runs.c.id, runs.c.created, runs.c.config).where(runs.c.state == "open")
    if only is not None:
        query = query.where(runs.c.id == only)
    return [_card(connection, row, now) for row in connection.execute(query.order_by(runs.c.created.desc())).all()]


def run_card(connection: Connection, run: str, now: float) -> RunCard:
    """Return one run."""
    cards = run_cards(connection, run, now)
    if not cards:
        raise NotFound(f"no run {run!r}")
    return cards[0]


def _card(connection: Connection, row: Any, now: float) -> RunCard:
    counts = _count_by_state(connection, row.id)
    totals = select(func.sum(attempts.c.calls), func.sum(attempts.c.tokens)).where(attempts.c.run_id == row.id)
    n_calls, n_tokens = connection.execute(totals).one()
    newest = select(events.c.at).where(events.c.run_id == row.id).order_by(events.c.seq.desc()).limit(1)
    last_event = connection.scalar(newest) or row.created
    config = decode_json(row.config)
    config = config if isinstance(config, dict) else {}
    steps = (config.get("training") or {}).get("steps") if isinstance(config.get("training"), dict) else None
    step = connection.scalar(select(func.max(metrics.c.step)).where(metrics.c.run_id == row.id)) or 0
    rewards = run_rewards(connection, row.id)
    measured = rewards.held_out or rewards.train
    best = max(measured, key=lambda one: (one.mean, one.step), default=None)
    now_at = measured[-1] if measured else None
    active = counts.get("running", 0) + counts.get("queued", 0) > 0
    if steps is not None and step >= steps and not active:
        state = "finished"
    else:
        state = "running" if now - last_event < _IDLE_AFTER_S else "idle"
    return RunCard(
        id=row.id,
        created=row.created,
        last_event=last_event,
        state=state,  # type: ignore[arg-type]  # mypy does not narrow the literal
        model=config.get("model") if isinstance(config.get("model"), str) else None,
        step=step,
        steps=steps if isinstance(steps, int) else None,
        rollouts=counts,
        calls=int(n_calls or 0),
        tokens=int(n_tokens or 0),
        held_out=bool(rewards.held_out),
        reward=now_at.mean if now_at else None,
        error=_error(now_at),
        best=best.mean if best else None,
        best_error=_error(best),
        best_step=best.step if best else None,
        curve=_thin(measured),
    )


def _error(rewards: StepRewards | None) -> float | None:
    """Return the standard error of a mean."""
    return rewards.deviation / sqrt(rewards.count) if rewards is not None and rewards.count > 1 else None


def _thin(rewards: Sequence[StepRewards]) -> Series:
    stride = -(-len(rewards) // _CARD_POINTS) or 1
    kept = [*rewards[:-1][::stride], *rewards[-1:]]
    return Series(tuple(one.step for one in kept), tuple(one.mean for one in kept))


def _count_by_state(connection: Connection, run: str) -> dict[str, int]:
    state = func.coalesce(rollouts.c.ending, rollouts.c.state)
    query = select(state, func.count()).where(rollouts.c.run_id == run).group_by(state)
    return {name: int(count) for name, count in connection.execute(query)}


def run_rewards(connection: Connection, run: str, role: str = "") -> RunRewards:
    """Return count, mean and deviation of the rewards of each step, of all rollouts or of those with a role."""
    reward = rollouts.c.reward
    query = (
        select(rollouts.c.purpose, rollouts.c.step, func.count(reward), func.sum(reward), func.sum(reward * reward))
        .where(rollouts.c.run_id == run, rollouts.c.step.is_not(None), reward.is_not(None))
        .group_by(rollouts.c.purpose, rollouts.c.step)
        .order_by(rollouts.c.step)
    )
    if role:
        query = query.where(rollouts.c.id.in_(_with_role(run, role)))
    found: dict[str, list[StepRewards]] = defaultdict(list)
    for purpose, step, count, total, squares in connection.execute(query):
        mean = total / count
        variance = max(0.0, squares / count - mean * mean) * count / max(1, count - 1)
        found[purpose].append(StepRewards(step, count, mean, sqrt(variance)))
    return RunRewards(tuple(found[str(Purpose.TRAIN)]), tuple(found[str(Purpose.EVAL)]))


def _with_role(run: str, role: str) -> Select[Any]:
    return select(roles.c.rollout_id).where(roles.c.run_id == run, roles.c.role == role.encode(errors="replace"))


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
        matching = _with_message(connection, run, conditions, query.message)
        total = len(matching)
        conditions = [rollouts.c.seq.in_(matching)]
    else:
        total = connection.scalar(select(func.count()).select_from(rollouts).where(*conditions)) or 0
    # Pages are found in the index alone, and only their rows are read.
    page = select(rollouts.c.seq).where(*conditions).order_by(*_SORTS[query.sort])
    found = connection.scalars(page.limit(query.limit).offset(query.offset)).all()
    rows = {row.seq: row for row in connection.execute(select(rollouts).where(rollouts.c.seq.in_(found)))}
    return RolloutListing(tuple(listed_rollout_from_row(rows[seq]) for seq in found), total)


def _conditions(run: str, query: RolloutQuery) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = [rollouts.c.run_id == run]
    if query.purpose is not None:
        found.append(rollouts.c.purpose == str(query.purpose))
    if query.ending:
        found.append(func.coalesce(rollouts.c.ending, rollouts.c.state).in_(query.ending.split(",")))
    if query.role:
        found.append(rollouts.c.id.in_(_with_role(run, query.role)))
    if query.task:
        found.append(rollouts.c.task_id == query.task)
    for column, low, high in (
        (rollouts.c.step, query.step_from, query.step_to),
        (rollouts.c.reward, query.reward_from, query.reward_to),
        (rollouts.c.tokens, query.tokens_from, None),
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


def failures(connection: Connection, run: str, step: int | None = None) -> Failures:
    """Group failed rollouts by ending and message; reads the newest ones only."""
    require_run(connection, run)
    conditions = [rollouts.c.run_id == run, _FAILED, *([rollouts.c.step == step] if step is not None else ())]
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


def facets(connection: Connection, run: str) -> Facets:
    """Return the values by which a run's rollouts can be filtered."""
    require_run(connection, run)
    purposes = connection.execute(
        select(rollouts.c.purpose, func.count()).where(rollouts.c.run_id == run).group_by(rollouts.c.purpose)
    )
    names = connection.scalars(select(roles.c.role).where(roles.c.run_id == run).distinct().limit(100))
    return Facets(
        endings=_count_by_state(connection, run),
        purposes={purpose: int(count) for purpose, count in purposes},
        roles=tuple(sorted(name.decode(errors="replace") for name in names)),
        last_step=connection.scalar(select(func.max(rollouts.c.step)).where(rollouts.c.run_id == run)),
    )


def group_rollouts(connection: Connection, run: str, group: str) -> list[ListedRollout]:
    """Return the rollouts of a group in order."""
    query = select(rollouts).where(rollouts.c.group_id == group, rollouts.c.run_id == run).order_by(rollouts.c.place)
    return [listed_rollout_from_row(row) for row in connection.execute(query)]


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
        .limit(_MAX_LEASES)
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


def require_run(connection: Connection, id: str) -> None:
    """Raise unless the run exists."""
    if connection.scalar(select(runs.c.id).where(runs.c.id == id, runs.c.state == "open")) is None:
        raise NotFound(f"no run {id!r}")
