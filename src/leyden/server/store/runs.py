"""Runs: made once, deleted piece by piece so that nobody waits long for the writer meanwhile."""

from sqlalchemy import delete, insert, select, update

from leyden.records import Run, State
from leyden.server.store.attempts import cancel
from leyden.server.store.codec import encode_json
from leyden.server.store.errors import Conflict, NotFound
from leyden.server.store.rows import run_from
from leyden.server.store.schema import attempts, events, groups, metrics, rollouts, runs, tasks, versions
from leyden.server.store.writer import Transaction
from leyden.wire import RunSpec

_PIECE = 200


def create_run(tx: Transaction, spec: RunSpec) -> Run:
    """Create a run; the same run again changes nothing."""
    settings, config = encode_json(spec.settings), encode_json(spec.config)
    row = tx.connection.execute(select(runs).where(runs.c.id == spec.id)).first()
    if row is None:
        new = {"id": spec.id, "settings": settings, "config": config, "created": tx.now}
        tx.connection.execute(insert(runs), {**new, "state": "open"})
        tx.emit(spec.id, "run.created", spec.id)
        return Run(spec.id, spec.settings, spec.config, tx.now)
    if row.state != "open":
        raise Conflict(f"run {spec.id!r} is being deleted: wait until it is gone, or choose another id")
    for name, value in (("settings", settings), ("config", config)):
        if getattr(row, name) != value:
            raise Conflict(f"run {spec.id!r} exists with another {name}: choose another id")
    return run_from(row)


def begin_delete(tx: Transaction, run: str) -> None:
    """Hide a run and cancel all of it; `delete_piece` does the rest."""
    hidden = tx.connection.execute(update(runs).where(runs.c.id == run).values(state="deleting"))
    if not hidden.rowcount:
        raise NotFound(f"no run {run!r}")
    unfinished = select(rollouts.c.group_id).where(rollouts.c.run_id == run, rollouts.c.state != State.FINISHED)
    for group in tx.connection.scalars(unfinished.distinct()).all():
        cancel(tx, run, group=group)


def delete_piece(tx: Transaction, run: str) -> bool:
    """Delete some of a hidden run; True when nothing is left of it."""
    for table, key in (
        (attempts, attempts.c.id),
        (groups, groups.c.id),
        (metrics, metrics.c.seq),
        (events, events.c.seq),
        (tasks, tasks.c.id),
        (versions, versions.c.number),
    ):
        some = tx.connection.scalars(select(key).where(table.c.run_id == run).limit(_PIECE)).all()
        if some:
            tx.connection.execute(delete(table).where(table.c.run_id == run, key.in_(some)))
            return False
    tx.connection.execute(delete(runs).where(runs.c.id == run))
    tx.emit(run, "run.deleted", run)
    return True
