"""The queue of rollouts and the leases that workers take from it.

The queue is fair (stride scheduling): groups are served in rotation, and a group of priority p gets 2**p rollouts for
each one of priority 0, so neither a large group nor a high priority starves the rest. Groups to train on that have one
run and one priority take turns as if they were one group, and are served in the order of their requests. A rollout's
`position` is fixed when it is queued: the i-th rollout of a group is i / 2**p behind the head, or behind the last
rollout of the group before it. A retry goes to the head, because its group waits for it, but is skipped until
`not_before`. A rollout whose position is infinite is parked: it is not leased until its group is requested again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import and_, bindparam, case, func, or_, select, update

from leyden.api.wire import GroupSpec, Lease, LeaseRequest
from leyden.records import Attempt, CallStatus, EventKind, Group, Origin, Purpose, RunSettings, Task
from leyden.store.codec import encode_json
from leyden.store.errors import Conflict, NotFound
from leyden.store.mapping import decode_settings, group_from_row, origin_from_row, task_from_row
from leyden.store.schema import LEASABLE, PARKED, attempts, calls, groups, rollouts, runs, tasks, workers
from leyden.store.write.statements import Statement, insert, insert_new, insert_or_update
from leyden.store.write.writer import Transaction


def enqueue(tx: Transaction, run: str, spec: GroupSpec) -> Group:
    """Create a group and queue its rollouts; the same group again only queues those of its rollouts that are parked."""
    settings = _RUN_SETTINGS.scalar(tx, run=run)
    if settings is None:
        raise NotFound(f"no run {run!r}")
    _put_task(tx, run, spec.task)
    purpose = str(spec.purpose)
    rules = decode_settings(settings)
    max_attempts = spec.max_attempts or rules.max_attempts
    new = {
        "id": spec.id,
        "run_id": run,
        "task_id": spec.task.id,
        "purpose": purpose,
        "size": spec.size,
        "max_attempts": max_attempts,
        "origin": None if spec.origin is None else encode_json(spec.origin),
    }
    row = _GROUP.first(tx, group=spec.id)
    if row is not None:
        if row.run_id != run:
            raise Conflict(
                f"run {row.run_id!r} has a group {spec.id!r}: give this one an id that no run of the store has"
            )
        for name, value in new.items():
            if getattr(row, name) != value:
                raise Conflict(f"group {spec.id!r} exists with {name} = {getattr(row, name)!r}, not {value!r}")
        if queued := _UNPARK.run_many(tx, _positions(tx, run, spec)):
            tx.emit(run, EventKind.GROUP_QUEUED, spec.id, size=queued, purpose=purpose)
        return group_from_row(row)
    if spec.origin is not None:
        _check_origin(tx, run, spec, spec.origin, rules)
    _ADD_GROUP.run(tx, **new, priority=spec.priority, done=0, created=tx.now)
    _ADD_ROLLOUT.run_many(
        tx,
        (
            {
                **queued,
                "run_id": run,
                "group_id": spec.id,
                "task_id": spec.task.id,
                "place": index,
                "purpose": purpose,
                "step": spec.step,
                "state": "queued",
                "attempts": 0,
                "max_attempts": max_attempts,
                "origin": new["origin"],
                "created": tx.now,
            }
            for index, queued in enumerate(_positions(tx, run, spec))
        ),
    )
    tx.emit(run, EventKind.GROUP_QUEUED, spec.id, size=spec.size, purpose=purpose)
    return Group(spec.id, run, spec.task.id, spec.purpose, spec.size, spec.priority, tx.now, origin=spec.origin)


def lease(tx: Transaction, requests: Sequence[LeaseRequest]) -> list[list[Lease]]:
    """Lease rollouts from the queue to each request, in the order of the requests."""
    leased: list[list[Lease]] = [[] for _ in requests]
    by_run: dict[str | None, list[int]] = {}
    for index, request in enumerate(requests):
        by_run.setdefault(request.run, []).extend([index] * request.count)
    for run, slots in by_run.items():
        bounds = {"most": len(slots), "now": tx.now}
        rows = _NEXT.all(tx, **bounds) if run is None else _NEXT_OF_RUN.all(tx, **bounds, run=run)
        started = [(index, _start(tx, row, requests[index])) for index, row in zip(slots, rows, strict=False)]
        _LEASE_ROLLOUT.run_many(  # before the next look at the queue: a worker may take rollouts of any run
            tx, ({"rollout": one.attempt.rollout, "number": one.attempt.number} for _, one in started)
        )
        _ADD_ATTEMPT.run_many(tx, (_attempt_row(one) for _, one in started))
        for index, one in started:
            leased[index].append(one)
    mark_seen(tx, (request.worker for request in requests))
    return leased


def requeue(tx: Transaction, rollout: str, not_before: float, alone: bool) -> None:
    """Put a rollout at the head of the queue for another attempt, not before a time and perhaps alone in a process.

    One that is parked stays so.
    """
    _REQUEUE.run(tx, rollout=rollout, head=_head(tx), earliest=not_before, separate=int(alone))


def mark_seen(tx: Transaction, ids: Iterable[str]) -> None:
    """Record that workers were seen now."""
    _SEEN.run_many(tx, ({"id": id, "seen": tx.now} for id in dict.fromkeys(ids)))


def _put_task(tx: Transaction, run: str, task: Task) -> None:
    data = encode_json(task.input)
    if (
        not _ADD_TASK.run(tx, run_id=run, id=task.id, input=data)
        and _TASK_INPUT.scalar(tx, run=run, task=task.id) != data
    ):
        raise Conflict(f"task {task.id!r} exists in run {run!r} with another input: give this one another id")


def _check_origin(tx: Transaction, run: str, spec: GroupSpec, origin: Origin, settings: RunSettings) -> None:
    """Raise unless the rollouts of a group may replay this."""
    row = _ORIGIN.first(tx, attempt=origin.attempt, run=run)
    if row is None:
        raise NotFound(f"`origin`: no attempt {origin.attempt!r} in run {run!r}")
    if not settings.replay:
        raise Conflict(f"`origin`: run {run!r} replays nothing: start one with `replay` in its [rollout]")
    if row.task_id != spec.task.id:
        raise Conflict(f"`origin`: attempt {origin.attempt!r} is of task {row.task_id!r}, not {spec.task.id!r}")
    if spec.purpose is Purpose.TRAIN and row.purpose != str(Purpose.TRAIN):
        raise Conflict(
            f"`origin`: attempt {origin.attempt!r} is of purpose {row.purpose}, and this group is trained on: "
            "name an attempt of a training rollout"
        )
    if row.made < origin.calls:
        raise Conflict(f"`origin`: attempt {origin.attempt!r} has made {row.made} calls, not {origin.calls}")


def _start(tx: Transaction, row: Any, request: LeaseRequest) -> Lease:
    """Start the next attempt of a rollout."""
    settings = decode_settings(row.settings)
    number = row.attempts + 1
    attempt = Attempt(
        id=f"{row.id}.{number}",
        run=row.run_id,
        rollout=row.id,
        number=number,
        worker=request.worker,
        pool=request.pool,
        started=tx.now,
        expires=tx.now + settings.lease_s,
        origin=_find_origin(tx, row, settings),
    )
    about_rollout = {"purpose": row.purpose, "step": row.step}
    tx.emit(attempt.run, EventKind.ATTEMPT_STARTED, attempt.id, **msgspec.to_builtins(attempt), **about_rollout)
    about = (attempt, task_from_row(row), Purpose(row.purpose), settings.lease_s)
    return Lease(*about, key="", url="", traceparent="", alone=bool(row.alone))


def _find_origin(tx: Transaction, row: Any, settings: RunSettings) -> Origin | None:
    """Return what the next attempt of a rollout replays: all that the last one recorded, or what its rollout does.

    An attempt that got no new answer is not replayed itself: the next one replays the same. A rollout starts anew if
    two of its attempts ended at the same call, and it may be to blame for both.
    """
    given = origin_from_row(row)
    if not (row.attempts and settings.replay):
        return given
    last = _PROGRESS.first(tx, attempt=f"{row.id}.{row.attempts}")
    if last.sampled:
        return Origin(last.id, last.made)
    before = origin_from_row(last)
    if before is None or before == given:
        return given
    ended_there = _ENDED_THERE.scalar(tx, rollout=row.id, replayed=before.attempt, origin=encode_json(before))
    return before if ended_there < 2 else given


def _attempt_row(leased: Lease) -> dict[str, Any]:
    attempt = leased.attempt
    return {
        "id": attempt.id,
        "run_id": attempt.run,
        "rollout_id": attempt.rollout,
        "number": attempt.number,
        "worker": attempt.worker,
        "pool": attempt.pool,
        "lease_s": leased.lease_s,
        "started": attempt.started,
        "expires": attempt.expires,
        "origin": None if attempt.origin is None else encode_json(attempt.origin),
        "calls": 0,
        "tokens": 0,
    }


def _positions(tx: Transaction, run: str, spec: GroupSpec) -> list[dict[str, Any]]:
    """Return the rollouts of a group and their positions if it is queued now."""
    in_order = spec.purpose is Purpose.TRAIN
    last = _LAST_TO_TRAIN.scalar(tx, run=run, priority=spec.priority) if in_order else None
    start = _head(tx) if last is None else float(last)
    return [
        {"id": f"{spec.id}.{index}", "position": start + (index + 1) / 2.0**spec.priority} for index in range(spec.size)
    ]


def _head(tx: Transaction) -> float:
    """Return the position of the first rollout in the queue."""
    return float(_HEAD.scalar(tx) or 0.0)


_RUN_SETTINGS = Statement(select(runs.c.settings).where(runs.c.id == bindparam("run"), runs.c.state == "open"))
_ADD_TASK = insert_new(tasks)
_TASK_INPUT = Statement(
    select(tasks.c.input).where(tasks.c.run_id == bindparam("run"), tasks.c.id == bindparam("task"))
)
_GROUP = Statement(select(groups).where(groups.c.id == bindparam("group")))
_ADD_GROUP = insert(groups, "origin")
_ADD_ROLLOUT = insert(rollouts, "step", "origin")
_calls_made = select(func.count()).where(calls.c.attempt_id == attempts.c.id)
_made = _calls_made.scalar_subquery()
_answered = _calls_made.where(calls.c.status == str(CallStatus.OK))
_ORIGIN = Statement(
    select(rollouts.c.task_id, rollouts.c.purpose, _made.label("made"))
    .join(attempts, attempts.c.rollout_id == rollouts.c.id)
    .where(attempts.c.id == bindparam("attempt"), attempts.c.run_id == bindparam("run"))
)
_PROGRESS = Statement(
    select(
        _answered.where(calls.c.origin.is_(None)).scalar_subquery().label("sampled"),
        _made.label("made"),
        attempts.c.id,
        attempts.c.origin,
    ).where(attempts.c.id == bindparam("attempt"))
)
_ended_there = or_(
    attempts.c.id == bindparam("replayed"),
    and_(
        attempts.c.origin == bindparam("origin"),
        _answered.scalar_subquery()
        >= select(func.count())
        .where(calls.c.attempt_id == bindparam("replayed"), calls.c.status == str(CallStatus.OK))
        .scalar_subquery(),
    ),
)
_ENDED_THERE = Statement(  # at the last call of an attempt that was replayed, and perhaps through their rollout's fault
    select(func.count()).where(
        attempts.c.rollout_id == bindparam("rollout"),
        attempts.c.blameless == 0,
        attempts.c.ended.is_not(None),
        _ended_there,
    )
)
_HEAD = Statement(select(func.min(rollouts.c.position)).where(LEASABLE))
_LAST_TO_TRAIN = Statement(
    select(func.max(rollouts.c.position)).where(
        LEASABLE,
        rollouts.c.run_id == bindparam("run"),
        rollouts.c.purpose == str(Purpose.TRAIN),
        select(groups.c.priority).where(groups.c.id == rollouts.c.group_id).scalar_subquery() == bindparam("priority"),
    )
)
_next = (
    select(rollouts, tasks.c.input, runs.c.settings)
    .join(runs, runs.c.id == rollouts.c.run_id)
    .join(tasks, (tasks.c.run_id == rollouts.c.run_id) & (tasks.c.id == rollouts.c.task_id))
    .where(LEASABLE, rollouts.c.not_before <= bindparam("now"))
    .order_by(rollouts.c.position, rollouts.c.seq)
    .limit(bindparam("most"))
)
_NEXT = Statement(_next)
_NEXT_OF_RUN = Statement(_next.where(rollouts.c.run_id == bindparam("run")))
_LEASE_ROLLOUT = Statement(
    update(rollouts).where(rollouts.c.id == bindparam("rollout")).values(state="running", attempts=bindparam("number"))
)
_ADD_ATTEMPT = insert(attempts, "pool", "origin")
_parked = rollouts.c.position == PARKED
_REQUEUE = Statement(
    update(rollouts)
    .where(rollouts.c.id == bindparam("rollout"))
    .values(
        state="queued",
        position=case((_parked, PARKED), else_=bindparam("head")),
        not_before=bindparam("earliest"),
        alone=bindparam("separate"),
    )
)
_UNPARK = Statement(
    update(rollouts)
    .where(rollouts.c.state != "finished", rollouts.c.id == bindparam("id"), _parked)
    .values(position=bindparam("position"))
)
_SEEN = insert_or_update(workers)
