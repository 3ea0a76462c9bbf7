"""The queue: how rollouts reach workers.

It is fair: of the groups that wait, each is served one rollout in its turn, and a group of priority p has 2**p
turns where one of priority 0 has one; so neither a large group nor a high priority starves the rest. A rollout's turn
is fixed when it is queued (`position`), as in stride scheduling: the i-th rollout of a group stands i / 2**p behind
the head of the queue. What must be tried again goes to the head, since the rest of its group waits for it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import Row, bindparam, func, insert, select, update

from leyden.records import Attempt, Group, Purpose, State, Task
from leyden.server.store.codec import encode_json
from leyden.server.store.database import insert_new, insert_or_update
from leyden.server.store.errors import Conflict, NotFound
from leyden.server.store.rows import decode_settings, group_from, task_from
from leyden.server.store.schema import attempts, groups, rollouts, runs, tasks, workers
from leyden.server.store.writer import Transaction
from leyden.wire import GroupSpec


class Want(Struct, frozen=True):
    """A request for work."""

    worker: str
    count: int
    run: str | None
    pool: str | None


class Grant(Struct, frozen=True):
    """An attempt that was leased."""

    attempt: Attempt
    task: Task
    purpose: Purpose
    lease_s: float
    agent_rewards: bool


def enqueue(tx: Transaction, run: str, spec: GroupSpec) -> Group:
    """Create a group and queue its rollouts; the same group again changes nothing."""
    settings_data = tx.connection.scalar(_RUN_SETTINGS, {"run": run})
    if settings_data is None:
        raise NotFound(f"no run {run!r}")
    settings = decode_settings(settings_data)
    _put_task(tx, run, spec.task)
    new = {
        "id": spec.id,
        "run_id": run,
        "task_id": spec.task.id,
        "purpose": spec.purpose,
        "size": spec.size,
        "priority": spec.priority,
        "max_attempts": spec.max_attempts or settings.max_attempts,
    }
    row = tx.connection.execute(_GROUP, {"group": spec.id}).first()
    if row is not None:
        for name, value in new.items():
            if getattr(row, name) != value:
                raise Conflict(f"group {spec.id!r} exists with {name} = {getattr(row, name)!r}, not {value!r}")
        return group_from(row)
    tx.connection.execute(insert(groups), {**new, "done": 0, "created": tx.now})
    head = _head(tx)
    tx.connection.execute(
        insert(rollouts),
        [
            {
                "id": f"{spec.id}.{index}",
                "run_id": run,
                "group_id": spec.id,
                "task_id": spec.task.id,
                "place": index,
                "purpose": spec.purpose,
                "state": State.QUEUED,
                "position": head + (index + 1) / 2.0**spec.priority,
                "attempts": 0,
                "max_attempts": new["max_attempts"],
                "created": tx.now,
            }
            for index in range(spec.size)
        ],
    )
    tx.emit(run, "group.queued", spec.id, size=spec.size, purpose=spec.purpose)
    return Group(spec.id, run, spec.task.id, spec.purpose, spec.size, spec.priority, tx.now)


def lease(tx: Transaction, wants: Sequence[Want]) -> list[list[Grant]]:
    """Give each of the wants, in their order, what the queue has for it."""
    granted: dict[int, list[Grant]] = {index: [] for index in range(len(wants))}
    by_run: dict[str | None, list[int]] = {}
    for index, want in enumerate(wants):
        by_run.setdefault(want.run, []).append(index)
    for run, indices in by_run.items():
        places = [index for index in indices for _ in range(wants[index].count)]
        rows = tx.connection.execute(_NEXT if run is None else _NEXT_OF_RUN, {"run": run, "most": len(places)}).all()
        for index, grant in zip(places, _start(tx, rows, [wants[index] for index in places]), strict=False):
            granted[index].append(grant)
    seen(tx, (want.worker for want in wants))
    return [granted[index] for index in range(len(wants))]


def requeue(tx: Transaction, rollout: str) -> None:
    """Put a rollout at the head of the queue, for another attempt."""
    tx.connection.execute(_REQUEUE, {"rollout": rollout, "head": _head(tx)})


def seen(tx: Transaction, ids: Iterable[str]) -> None:
    """Note that workers were heard of."""
    rows = [{"id": id, "seen": tx.now} for id in dict.fromkeys(ids)]
    insert_or_update(tx.connection, workers, rows)


def _put_task(tx: Transaction, run: str, task: Task) -> None:
    data = encode_json(task.input)
    if insert_new(tx.connection, tasks, {"run_id": run, "id": task.id, "input": data}):
        return
    if tx.connection.scalar(_TASK_INPUT, {"run": run, "task": task.id}) != data:
        raise Conflict(f"task {task.id!r} exists in run {run!r} with another input: give this one another id")


def _start(tx: Transaction, rows: Sequence[Row[Any]], wants: Sequence[Want]) -> list[Grant]:
    """Make the next attempt of each of the rollouts."""
    grants, changes = [], []
    for row, want in zip(rows, wants, strict=False):
        number = row.attempts + 1
        settings = decode_settings(row.settings)
        attempt = Attempt(
            id=f"{row.id}.{number}",
            run=row.run_id,
            rollout=row.id,
            number=number,
            worker=want.worker,
            pool=want.pool,
            started=tx.now,
            expires=tx.now + settings.lease_s,
        )
        grants.append(Grant(attempt, task_from(row), Purpose(row.purpose), settings.lease_s, settings.agent_rewards))
        changes.append({"rollout": row.id, "number": number})
        tx.emit(
            row.run_id,
            "attempt.started",
            attempt.id,
            rollout=row.id,
            worker=want.worker,
            pool=want.pool,
            expires=attempt.expires,
        )
    if grants:
        tx.connection.execute(_RUN_ROLLOUT, changes)
        tx.connection.execute(
            insert(attempts),
            [
                {
                    "id": grant.attempt.id,
                    "run_id": grant.attempt.run,
                    "rollout_id": grant.attempt.rollout,
                    "number": grant.attempt.number,
                    "worker": grant.attempt.worker,
                    "pool": grant.attempt.pool,
                    "lease_s": grant.lease_s,
                    "started": grant.attempt.started,
                    "expires": grant.attempt.expires,
                }
                for grant in grants
            ],
        )
    return grants


def _head(tx: Transaction) -> float:
    """The position of the rollout whose turn it is."""
    return float(tx.connection.scalar(_HEAD) or 0.0)


_RUN_SETTINGS = select(runs.c.settings).where(runs.c.id == bindparam("run"), runs.c.state == "open")
_TASK_INPUT = select(tasks.c.input).where(tasks.c.run_id == bindparam("run"), tasks.c.id == bindparam("task"))
_GROUP = select(groups).where(groups.c.id == bindparam("group"))
_HEAD = select(func.min(rollouts.c.position)).where(rollouts.c.state == "queued")
_NEXT = (
    select(rollouts, tasks.c.input, runs.c.settings)
    .join(runs, runs.c.id == rollouts.c.run_id)
    .join(tasks, (tasks.c.run_id == rollouts.c.run_id) & (tasks.c.id == rollouts.c.task_id))
    .where(rollouts.c.state == "queued")
    .order_by(rollouts.c.position, rollouts.c.seq)
    .limit(bindparam("most"))
)
_NEXT_OF_RUN = _NEXT.where(rollouts.c.run_id == bindparam("run"))
_RUN_ROLLOUT = (
    update(rollouts)
    .where(rollouts.c.id == bindparam("rollout"))
    .values(state=State.RUNNING, attempts=bindparam("number"))
)
_REQUEUE = (
    update(rollouts).where(rollouts.c.id == bindparam("rollout")).values(state=State.QUEUED, position=bindparam("head"))
)
