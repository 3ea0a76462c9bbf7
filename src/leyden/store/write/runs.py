"""Creates, prunes and deletes runs. Deletion goes in batches, so that other writes do not wait long.

The newest event of the log stays until the deletion's own event follows it, so that no number is given twice.
"""

from sqlalchemy import Column, ColumnElement, Table, bindparam, delete, func, select, update

from leyden.api.wire import RunSpec
from leyden.records import EventKind, Run
from leyden.store.codec import encode_json
from leyden.store.errors import Conflict, NotFound
from leyden.store.mapping import run_from_row
from leyden.store.schema import attempts, events, groups, metrics, rollouts, runs, spans, tasks, versions
from leyden.store.write.attempts import cancel_group
from leyden.store.write.statements import Statement, insert
from leyden.store.write.writer import Transaction

_BATCH = 200
"""Rows of one transaction."""


def create_run(tx: Transaction, spec: RunSpec) -> Run:
    """Create a run; the same run again changes nothing."""
    settings, config = encode_json(spec.settings), encode_json(spec.config)
    row = _RUN.first(tx, run=spec.id)
    if row is None:
        _ADD_RUN.run(tx, id=spec.id, state="open", settings=settings, config=config, created=tx.now)
        tx.emit(spec.id, EventKind.RUN_CREATED, spec.id)
        return Run(spec.id, spec.settings, spec.config, tx.now)
    if row.state != "open":
        raise Conflict(f"run {spec.id!r} is being deleted: wait until it is gone, or choose another id")
    for name, value in (("settings", settings), ("config", config)):
        if getattr(row, name) != value:
            raise Conflict(f"run {spec.id!r} exists with another {name}: choose another id")
    return run_from_row(row)


def begin_delete(tx: Transaction, run: str) -> None:
    """Hide a run and cancel its groups; `delete_batch` deletes its rows."""
    if not _HIDE.run(tx, run=run):
        raise NotFound(f"no run {run!r}")
    for row in _UNFINISHED_GROUPS.all(tx, run=run):
        cancel_group(tx, run, row.id)


def delete_batch(tx: Transaction, run: str) -> bool:
    """Delete one batch of a hidden run; True when nothing is left."""
    if any(delete_some.run(tx, run=run) for delete_some in _DELETES):
        return False
    _DELETE_LAST_EVENT.run(tx, run=run)
    _DELETE_RUN.run(tx, run=run)
    tx.emit(run, EventKind.RUN_DELETED, run)
    return True


def _delete_from(table: Table, key: Column[object], *conditions: ColumnElement[bool]) -> Statement:
    batch = select(key).where(table.c.run_id == bindparam("run"), *conditions).limit(_BATCH)
    return Statement(delete(table).where(table.c.run_id == bindparam("run"), key.in_(batch)))


_RUN = Statement(select(runs).where(runs.c.id == bindparam("run")))
_ADD_RUN = insert(runs)
_HIDE = Statement(update(runs).where(runs.c.id == bindparam("run")).values(state="deleting"))
_UNFINISHED_GROUPS = Statement(
    select(groups.c.id).where(groups.c.run_id == bindparam("run"), groups.c.finished.is_(None))
)
_all_events = events.alias()
_DELETES = [  # calls, spans, rewards and credits are deleted with their attempt, roles with their rollout
    _delete_from(attempts, attempts.c.id),
    _delete_from(rollouts, rollouts.c.seq),
    _delete_from(groups, groups.c.id),
    _delete_from(tasks, tasks.c.id),
    _delete_from(versions, versions.c.number),
    _delete_from(metrics, metrics.c.seq),
    _delete_from(events, events.c.seq, events.c.seq < select(func.max(_all_events.c.seq)).scalar_subquery()),
]
_DELETE_LAST_EVENT = Statement(delete(events).where(events.c.run_id == bindparam("run")))
_DELETE_RUN = Statement(delete(runs).where(runs.c.id == bindparam("run")))


def prune_output(tx: Transaction, run: str, step: int) -> bool:
    """Delete the output of some attempts up to a step; returns whether there were any."""
    return bool(_FORGET_OUTPUT.run(tx, of_run=run, up_to=step))


def prune_spans(tx: Transaction, run: str, step: int) -> bool:
    """Delete some spans of attempts up to a step; returns whether there were any."""
    return bool(_DELETE_SPANS.run(tx, of_run=run, up_to=step))


_old = (
    select(attempts.c.id)
    .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
    .where(rollouts.c.run_id == bindparam("of_run"), rollouts.c.step <= bindparam("up_to"))
    .where(attempts.c.ended.is_not(None))
)
_FORGET_OUTPUT = Statement(
    update(attempts)
    .where(attempts.c.id.in_(_old.where(attempts.c.output.is_not(None)).limit(_BATCH)))
    .values(output=None)
)
_DELETE_SPANS = Statement(
    delete(spans).where(spans.c.seq.in_(select(spans.c.seq).where(spans.c.attempt_id.in_(_old)).limit(_BATCH)))
)
