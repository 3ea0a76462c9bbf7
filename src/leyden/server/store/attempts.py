"""How attempts end. Each ends once; what becomes of its rollout is read from the outcome table."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, bindparam, func, select, update

from leyden.outcomes import MEANING, Ending, Outcome
from leyden.records import Rollout, State
from leyden.server.store.codec import encode_json
from leyden.server.store.errors import NotFound
from leyden.server.store.queue import requeue, seen
from leyden.server.store.recording import record_rewards
from leyden.server.store.rows import outcome_from, rollout_from
from leyden.server.store.schema import attempts, calls, groups, rollouts
from leyden.server.store.writer import Transaction
from leyden.wire import BeatReply, Ended, Finish, Finished

NO_REWARD = Outcome(
    Ending.NO_REWARD,
    "the attempt succeeded without a final reward: return a number from the agent, or configure `reward`",
)


def beat(tx: Transaction, worker: str, ids: Sequence[str], run: str | None) -> BeatReply:
    """Prolong the leases of a worker's attempts (of one run, or all), and tell it which of them are over."""
    found = {row.id: row for row in tx.connection.execute(_ATTEMPTS, {"ids": list(ids)})} if ids else {}
    mine = {id: row for id, row in found.items() if row.worker == worker and run in (None, row.run_id)}
    expires = {id: tx.now + row.lease_s for id, row in mine.items() if row.ended is None}
    if expires:
        tx.connection.execute(_PROLONG, [{"attempt": id, "expires": moment} for id, moment in expires.items()])
    seen(tx, [worker])
    ended = (Ended(id, outcome_from(mine[id]) if id in mine else None) for id in ids if id not in expires)
    return BeatReply(expires, tuple(ended))


def expire(tx: Transaction) -> int:
    """End every attempt whose lease has run out."""
    overdue = tx.connection.execute(_OVERDUE, {"now": tx.now}).all()
    for row in overdue:
        message = f"worker {row.worker} sent no heartbeat for {row.lease_s:g} s: it died, or cannot reach the server"
        _end(tx, row, Outcome(Ending.LOST, message))
    return len(overdue)


def grace(tx: Transaction) -> None:
    """Prolong every lease by its whole length: nobody could send heartbeats while the server was away."""
    tx.connection.execute(
        update(attempts).where(attempts.c.ended.is_(None)).values(expires=tx.now + attempts.c.lease_s)
    )


def finish(tx: Transaction, run: str, attempt: str, report: Finish) -> Finished:
    """End an attempt, once: a repeated or late report goes into the log and changes nothing else."""
    row = tx.connection.execute(_ATTEMPT, {"attempt": attempt, "run": run}).first()
    if row is None:
        raise NotFound(f"no attempt {attempt!r} in run {run!r}")
    if row.ended is not None:
        tx.emit(run, "attempt.late", attempt, outcome=report.outcome, result=report.result, rewards=report.rewards)
        standing = outcome_from(row)
        assert standing is not None
        return Finished(False, standing, _rollout(tx, row.rollout_id))
    record_rewards(tx, run, attempt, report.rewards)
    outcome = report.outcome
    if outcome.ending is Ending.SUCCEEDED and tx.connection.scalar(_REWARD, {"attempt": attempt}) is None:
        outcome = NO_REWARD
    _end(tx, row, outcome, report.result)
    return Finished(True, outcome, _rollout(tx, row.rollout_id))


def cancel(tx: Transaction, run: str, *, group: str | None = None, rollout: str | None = None) -> int:
    """End the unfinished rollouts of a group, or one rollout, at once; their keys die with them."""
    table, name = (groups, group) if rollout is None else (rollouts, rollout)
    if not tx.connection.scalar(select(table.c.id).where(table.c.run_id == run, table.c.id == name)):
        raise NotFound(f"no {table.name[:-1]} {name!r} in run {run!r}")
    column = rollouts.c.group_id if rollout is None else rollouts.c.id
    outcome = Outcome(Ending.CANCELLED, f"{table.name[:-1]} {name} was cancelled")
    unfinished = tx.connection.execute(select(rollouts).where(column == name, rollouts.c.state != State.FINISHED)).all()
    for row in unfinished:
        if row.state == State.QUEUED:
            _finish_rollout(tx, row.run_id, row.id, row.group_id, outcome)
            continue
        alive = tx.connection.execute(_ALIVE_OF_ROLLOUT, {"rollout": row.id}).one()
        _end(tx, alive, outcome)
    return len(unfinished)


def _end(tx: Transaction, row: Row[Any], outcome: Outcome, result: Any = None) -> None:
    """End a live attempt (a row of `_ATTEMPT`'s kind), and decide by the outcome table what becomes of its rollout."""
    message = outcome.message.encode()
    tx.connection.execute(
        _END_ATTEMPT,
        {
            "attempt": row.id,
            "now": tx.now,
            "with_ending": outcome.ending,
            "with_message": message,
            "with_result": None if result is None else encode_json(result),
        },
    )
    tx.emit(
        row.run_id,
        "attempt.ended",
        row.id,
        rollout=row.rollout_id,
        ending=outcome.ending,
        message=outcome.message,
    )
    if MEANING[outcome.ending].retried and row.number < row.max_attempts:
        requeue(tx, row.rollout_id)
        tx.emit(row.run_id, "rollout.queued", row.rollout_id, after=row.id)
    else:
        _finish_rollout(tx, row.run_id, row.rollout_id, row.group_id, outcome)


def _finish_rollout(tx: Transaction, run: str, rollout: str, group: str, outcome: Outcome) -> None:
    tx.connection.execute(
        _FINISH_ROLLOUT,
        {
            "rollout": rollout,
            "now": tx.now,
            "with_ending": outcome.ending,
            "with_message": outcome.message.encode(),
        },
    )
    tx.emit(run, "rollout.finished", rollout, ending=outcome.ending)
    counted = tx.connection.execute(_COUNT_DONE, {"group": group}).one()
    if counted.done == counted.size:
        tx.connection.execute(_FINISH_GROUP, {"group": group, "now": tx.now})
        tx.emit(run, "group.finished", group)


def _rollout(tx: Transaction, rollout: str) -> Rollout:
    return rollout_from(tx.connection.execute(_ROLLOUT, {"rollout": rollout}).one())


_with_rollout = select(attempts, rollouts.c.group_id, rollouts.c.max_attempts).join(
    rollouts, rollouts.c.id == attempts.c.rollout_id
)

_ROLLOUT = select(rollouts).where(rollouts.c.id == bindparam("rollout"))
_ATTEMPT = _with_rollout.where(attempts.c.id == bindparam("attempt"), attempts.c.run_id == bindparam("run"))
_ATTEMPTS = select(attempts).where(attempts.c.id.in_(bindparam("ids", expanding=True)))
_ALIVE_OF_ROLLOUT = _with_rollout.where(attempts.c.rollout_id == bindparam("rollout"), attempts.c.ended.is_(None))
_OVERDUE = _with_rollout.where(attempts.c.ended.is_(None), attempts.c.expires <= bindparam("now"))
_PROLONG = update(attempts).where(attempts.c.id == bindparam("attempt")).values(expires=bindparam("expires"))
_REWARD = select(attempts.c.reward).where(attempts.c.id == bindparam("attempt"))
_calls_made = calls.c.attempt_id == bindparam("attempt")
_END_ATTEMPT = (
    update(attempts)
    .where(attempts.c.id == bindparam("attempt"))
    .values(
        ended=bindparam("now"),
        ending=bindparam("with_ending"),
        message=bindparam("with_message"),
        result=bindparam("with_result"),
        calls=select(func.count()).where(_calls_made).scalar_subquery(),
        tokens=select(func.coalesce(func.sum(calls.c.sampled), 0)).where(_calls_made).scalar_subquery(),
    )
)
_FINISH_ROLLOUT = (
    update(rollouts)
    .where(rollouts.c.id == bindparam("rollout"))
    .values(
        state=State.FINISHED,
        finished=bindparam("now"),
        ending=bindparam("with_ending"),
        message=bindparam("with_message"),
    )
)
_COUNT_DONE = (
    update(groups)
    .where(groups.c.id == bindparam("group"))
    .values(done=groups.c.done + 1)
    .returning(groups.c.done, groups.c.size)
)
_FINISH_GROUP = update(groups).where(groups.c.id == bindparam("group")).values(finished=bindparam("now"))
