"""Queries of the dashboard about what runs now: workers, active attempts, the queue, recent throughput."""

from collections import defaultdict

from sqlalchemy import Connection, func, select

from leyden.api.fleet import MAX_LEASES, Fleet, LeaseView, WorkerView
from leyden.store.schema import ACTIVE, LEASABLE, attempts, rollouts, versions, workers

_RECENT_S = 600.0


def read_fleet(connection: Connection, now: float, held: bool | None = None) -> Fleet:
    """Return workers, active attempts and the queue; a server adds its engines.

    The store of a run that no process holds (`held` is False) has none of them.
    """
    ended, tokens = recent_throughput(connection, now)
    if held is False:
        return Fleet(now, (), (), 0, 0, 0, ended, tokens)
    queued, delayed = count_queue(connection, now)
    return Fleet(
        now=now,
        workers=tuple(list_workers(connection, now)),
        leases=tuple(list_leases(connection)),
        queued=queued,
        delayed=delayed,
        running=connection.scalar(select(func.count()).select_from(attempts).where(ACTIVE)) or 0,
        ended=ended,
        tokens=tokens,
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
    by = attempts.c.worker, attempts.c.ending
    recent = select(*by, func.count()).where(attempts.c.ended > now - _RECENT_S).group_by(*by)
    for worker, ending, count in connection.execute(recent):
        ended[worker][ending] = count
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
    """Return how many rollouts wait for a worker, and how many of them wait for their retry."""
    queued = connection.scalar(select(func.count()).select_from(rollouts).where(LEASABLE)) or 0
    delayed = select(func.count()).select_from(rollouts).where(LEASABLE, rollouts.c.not_before > now)
    return queued, connection.scalar(delayed) or 0


def newest_versions(connection: Connection) -> dict[str, int]:
    """Return the newest version of each policy, over all runs."""
    query = select(versions.c.policy, func.max(versions.c.number)).group_by(versions.c.policy)
    return {policy: int(number) for policy, number in connection.execute(query)}
