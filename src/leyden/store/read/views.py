"""Queries of the dashboard about runs: their metrics, their cards, their newest events and versions.

They read indexes and single pages, so large rollouts cost no more than small ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, bindparam, func, select

from leyden.api.views import PointsQuery, RunCard, Series, SeriesQuery, StepRange, StepRewards
from leyden.records import DEFAULT_POLICY
from leyden.store.errors import NotFound
from leyden.store.files.run_lock import count_interrupted
from leyden.store.read.queries import configuration, distinct_values, require_run, section
from leyden.store.read.run_digest import PointBins, RunDigest, best_step, digest_run
from leyden.store.schema import events, metrics, runs, versions

_CARD_POINTS = 60
_IDLE_AFTER_S = 120.0


def read_series(connection: Connection, run: str, query: SeriesQuery) -> dict[str, Series]:
    """Return metrics of a policy that a run trains. A name that ends in * selects by prefix."""
    names = [name for name in query.names.split(",") if name]
    of_policy = metrics.c.run_id == run, metrics.c.policy == (query.policy or trained_policies(connection, run)[0])
    known = distinct_values(connection, metrics.c.name, *of_policy)
    if not known:
        require_run(connection, run)
    chosen = [name for name in known if not names or any(_selects(selector, name) for selector in names)]
    # Each name is a range of the index that has its last step at the end and needs no sorting of the other names.
    of_name = *of_policy, metrics.c.name == bindparam("metric"), *_in_range(query)
    bins = _bins(connection, of_name, chosen, query)
    value = metrics.c.value
    columns = [func.max(metrics.c.step), func.avg(value)]
    if bins.width > 1:
        columns += [func.min(value), func.max(value)]
    step = (metrics.c.step - bins.first) // bins.width if bins.width > 1 else metrics.c.step
    values = select(*columns).where(*of_name).group_by(step).order_by(step)
    found = {name: connection.execute(values, {"metric": name}).all() for name in chosen}
    return {name: Series(*map(tuple, zip(*rows, strict=True))) for name, rows in found.items() if rows}


def read_step_times(connection: Connection, run: str, query: PointsQuery) -> Series:
    """Return when steps of a run ended, in seconds since 1970: when the metric that most steps have was recorded."""
    of_policy = metrics.c.run_id == run, metrics.c.policy == trained_policies(connection, run)[0]
    name = connection.scalar(
        select(metrics.c.name).where(*of_policy).group_by(metrics.c.name).order_by(func.count().desc()).limit(1)
    )
    if name is None:
        require_run(connection, run)
        return Series((), ())
    of_name = *of_policy, metrics.c.name == bindparam("metric"), *_in_range(query)
    bins = _bins(connection, of_name, [name], query)
    step = (metrics.c.step - bins.first) // bins.width
    times = select(func.max(metrics.c.step), func.max(metrics.c.at)).where(*of_name).group_by(step).order_by(step)
    rows = connection.execute(times, {"metric": name}).all()
    return Series(tuple(row[0] for row in rows), tuple(row[1] for row in rows))


def _in_range(query: StepRange) -> list[ColumnElement[bool]]:
    first, last = query.step_from, query.step_to
    found = [metrics.c.step >= first] if first is not None else []
    return [*found, metrics.c.step <= last] if last is not None else found


def _bins(
    connection: Connection, of_name: Sequence[ColumnElement[bool]], names: Sequence[str], query: PointsQuery
) -> PointBins:
    """Return which steps to join, so that no metric has more points than are asked for."""
    ends = select(func.min(metrics.c.step), func.max(metrics.c.step)).where(*of_name)
    found = [connection.execute(ends, {"metric": name}).one() for name in names]
    known = [(first, last) for first, last in found if first is not None]
    firsts, lasts = zip(*known, strict=True) if known else ((0,), (0,))
    return PointBins.of(min(firsts), max(lasts), query.points)


def _selects(selector: str, name: str) -> bool:
    return name.startswith(selector[:-1]) if selector.endswith("*") else name == selector


def trained_policies(connection: Connection, run: str) -> list[str]:
    """Return the names of the policies that a run trains, at least one; it has the default name if none is set."""
    return _trained_policies(configuration(connection, run))


def _trained_policies(config: Mapping[str, Any]) -> list[str]:
    trained = [
        str(name)
        for name, policy in section(config, "policies").items()
        if isinstance(policy, dict) and policy.get("trained", True) and not (policy.get("upstream") or policy.get("of"))
    ]
    named = config.get("policy")
    return trained or [named if isinstance(named, str) else DEFAULT_POLICY]


def has_policies(connection: Connection, run: str) -> bool:
    """Whether the configuration of a run has several policies, trained or not."""
    return len(section(configuration(connection, run), "policies")) > 1


class NewestEvent(Struct, frozen=True):
    """The number of the newest event and when it happened; both 0 if there is none."""

    seq: int
    at: float


def newest_event(connection: Connection, run: str | None = None) -> NewestEvent:
    """Return the newest event of a run, or of all runs."""
    query = select(events.c.seq, events.c.at).order_by(events.c.seq.desc()).limit(1)
    row = connection.execute(query if run is None else query.where(events.c.run_id == run)).first()
    return NewestEvent(row.seq, row.at) if row is not None else NewestEvent(0, 0.0)


def last_event_before(connection: Connection, moment: float) -> int:
    """Return the number of the newest event before a moment; 0 if there is none."""
    query = select(events.c.seq).where(events.c.at < moment).order_by(events.c.seq.desc()).limit(1)
    return connection.scalar(query) or 0


def count_events(connection: Connection, after: int) -> tuple[int, dict[tuple[str, str], int]]:
    """Count the events after a number by run and kind; return the newest number with the counts."""
    query = select(events.c.run_id, events.c.kind, func.count(), func.max(events.c.seq)).where(events.c.seq > after)
    found = connection.execute(query.group_by(events.c.run_id, events.c.kind)).all()
    return max((row[3] for row in found), default=after), {(run, kind): count for run, kind, count, _ in found}


def run_card(
    connection: Connection, run: str, now: float, digest: RunDigest | None = None, held: bool | None = None
) -> RunCard:
    """Return state, step and rewards of a run; `digest` saves reading its totals again.

    `held` says whether a process works on it; if that is not known (None), a silent run is idle after two minutes.
    """
    created = connection.scalar(select(runs.c.created).where(runs.c.id == run, runs.c.state == "open"))
    if created is None:
        raise NotFound(f"no run {run!r}")
    digest = digest or digest_run(connection, run)
    last_event = newest_event(connection, run).at or created
    config, published = configuration(connection, run), versions_at(connection, run, None)
    steps = section(config, "training").get("steps")
    if digest.trains_nothing or not isinstance(steps, int):
        steps = None  # the configuration of what trains nothing may be that of a training
    last_metric = select(metrics.c.step).where(metrics.c.run_id == run).order_by(metrics.c.seq.desc()).limit(1)
    step = connection.scalar(last_metric) or 0
    joined = digest.rewards(PointsQuery(_CARD_POINTS))
    measured = digest.measured
    best = None if digest.trains_nothing else best_step(measured)
    now_at = measured[-1] if measured else None
    active = digest.states.get("running", 0) + digest.states.get("queued", 0) > 0
    state: Literal["running", "finished", "unchanged", "idle"]
    if not active and (digest.trains_nothing or (steps is not None and step >= steps)):
        trained = digest.trains_nothing or not steps or any(published.values())
        state = "finished" if trained else "unchanged"
    else:
        alive = held if held is not None else now - last_event < _IDLE_AFTER_S
        state = "running" if alive else "idle"
    return RunCard(
        id=run,
        created=created,
        last_event=last_event,
        state=state,
        model=config.get("model") if isinstance(config.get("model"), str) else None,
        step=step,
        steps=steps,
        rollouts=count_interrupted(digest.states, held),
        calls=digest.calls,
        tokens=digest.tokens,
        held_out=bool(digest.held_out),
        reward=now_at.mean if now_at else None,
        error=digest.errors.get(now_at.step) if now_at else None,
        counted=now_at.count if now_at else 0,
        measured="held-out" if digest.held_out else "training" if digest.train else "dev",
        best=best.mean if best else None,
        best_error=digest.errors.get(best.step) if best else None,
        best_step=best.step if best else None,
        curve=_curve(joined.held_out or joined.train),
        policies={name: published.get(name, 0) for name in _trained_policies(config)},
    )


def _curve(rewards: Sequence[StepRewards]) -> Series:
    return Series(tuple(one.step for one in rewards), tuple(one.mean for one in rewards))


def versions_at(connection: Connection, run: str, moment: float | None) -> dict[str, int]:
    """Return by policy the newest version of its weights that was published by a moment; None: by now."""
    query = select(versions.c.policy, func.max(versions.c.number)).where(versions.c.run_id == run)
    query = query if moment is None else query.where(versions.c.at <= moment)
    return {row[0]: row[1] for row in connection.execute(query.group_by(versions.c.policy))}
