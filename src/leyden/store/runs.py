"""Runs: made once, deleted piece by piece so that nobody waits long for the writer meanwhile."""

from sqlalchemy import Column, Table, bindparam, delete, select, update

from leyden.records import EventKind, Run
from leyden.store.attempts import cancel_group
from leyden.store.codec import encode_json
from leyden.store.errors import Conflict, NotFound
from leyden.store.mapping import run_from
from leyden.store.schema import attempts, events, groups, metrics, rollouts, runs, tasks, versions
from leyden.store.statements import Statement, insert
from leyden.store.writer import Transaction
from leyden.wire import RunSpec

_PIECE = 200


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
    return run_from(row)


def begin_delete(tx: Transaction, run: str) -> None:
    """Hide a run and cancel all of it; `delete_piece` does the rest."""
    if not _HIDE.run(tx, run=run):
        raise NotFound(f"no run {run!r}")
    for row in _UNFINISHED_GROUPS.all(tx, run=run):
        cancel_group(tx, run, row.id)


def delete_piece(tx: Transaction, run: str) -> bool:
    """Delete some of a hidden run; True when nothing is left of it."""
    if any(piece.run(tx, run=run) for piece in _PIECES):
        return False
    _DELETE_RUN.run(tx, run=run)
    tx.emit(run, EventKind.RUN_DELETED, run)
    return True


def _piece(table: Table, key: Column[object]) -> Statement:
    some = select(key).where(table.c.run_id == bindparam("run")).limit(_PIECE)
    return Statement(delete(table).where(table.c.run_id == bindparam("run"), key.in_(some)))


_RUN = Statement(select(runs).where(runs.c.id == bindparam("run")))
_ADD_RUN = insert(runs, "id", "state", "settings", "config", "created")
_HIDE = Statement(update(runs).where(runs.c.id == bindparam("run")).values(state="deleting"))
_UNFINISHED_GROUPS = Statement(
    select(groups.c.id).where(groups.c.run_id == bindparam("run"), groups.c.finished.is_(None))
)
_PIECES = [  # with an attempt go its calls, spans and rewards
    _piece(attempts, attempts.c.id),
    _piece(rollouts, rollouts.c.seq),
    _piece(groups, groups.c.id),
    _piece(tasks, tasks.c.id),
    _piece(versions, versions.c.number),
    _piece(metrics, metrics.c.seq),
    _piece(events, events.c.seq),
]
_DELETE_RUN = Statement(delete(runs).where(runs.c.id == bindparam("run")))
