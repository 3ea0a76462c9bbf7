"""Scoring of whole groups: a group waits for its last rollout, is leased to a worker for scoring, and is then finished.

A group is scored once. After a lease that expires or is returned, another worker may score the group; a group that
cannot be scored, or whose leases expired too often, ends as `no_reward`. No crash leaves a group unfinished.
"""

from typing import Any

from sqlalchemy import bindparam, delete, select, update

from leyden.api.wire import Counted, GroupScoring, Scores, ScoringHeartbeat
from leyden.outcomes import Ending
from leyden.records import GROUP_REWARD_ID, EventKind, final_rewards
from leyden.store.errors import NotFound
from leyden.store.mapping import decode_settings, group_from_row
from leyden.store.schema import LAST_ATTEMPT, attempts, groups, rollouts, runs, scorings
from leyden.store.write.queue import mark_seen
from leyden.store.write.recording import record_rewards
from leyden.store.write.statements import Statement, insert_new
from leyden.store.write.writer import Transaction

SOURCE = "reward"
"""Source of the rewards: the run's reward function, as for a rollout that is scored alone."""
_NO_SCORE = "the reward function gave it no reward"


def add_pending(tx: Transaction, run: str, group: str) -> None:
    """Record that a rollout of the group has ended and waits to be scored with the others."""
    _ADD_PENDING.run(tx, group_id=group, run_id=run, number=0, lost=0)


def close_group(tx: Transaction, run: str, group: str) -> None:
    """Handle the end of a group's last rollout: queue the group for scoring if it needs it, else finish it."""
    if _READY.run(tx, group=group, now=tx.now):
        tx.emit(run, EventKind.SCORING_QUEUED, group)
    else:
        _finish(tx, run, group)


def lease(tx: Transaction, worker: str, run: str | None) -> GroupScoring | None:
    """Lease the group that has waited longest to a worker; None if there is none."""
    row = _NEXT.first(tx) if run is None else _NEXT_OF_RUN.first(tx, run=run)
    if row is None:
        return None
    number, lease_s = row.number + 1, decode_settings(row.settings).lease_s
    expires = tx.now + lease_s
    _LEASE.run(tx, group=row.id, with_number=number, by=worker, length=lease_s, until=expires)
    tx.emit(row.run_id, EventKind.SCORING_STARTED, row.id, worker=worker, number=number, expires=expires)
    mark_seen(tx, [worker])
    return GroupScoring(group_from_row(row), number, lease_s)


def heartbeat(tx: Transaction, run: str, group: str, lease: ScoringHeartbeat) -> Counted:
    """Renew a lease, if it is current."""
    row = _current_lease(tx, run, group, lease.number)
    if row is not None:
        _RENEW.run(tx, group=group, until=tx.now + row.lease_s)
    return Counted(row is not None)


def finish(tx: Transaction, run: str, group: str, scores: Scores) -> Counted:
    """Record the scores of a group and finish it, or requeue it if the worker returned it."""
    if _current_lease(tx, run, group, scores.number) is None:
        if _GROUP.first(tx, group=group, run=run) is None:
            raise NotFound(f"no group {group!r} in run {run!r}")
        tx.emit(
            run, EventKind.SCORING_LATE, group, number=scores.number, rewards=scores.rewards, message=scores.message
        )
        return Counted(False)
    if scores.given_back:
        _requeue(tx, run, group, lost=0)
        return Counted(True)
    known = {row.rollout_id: row.id for row in _SUCCEEDED.all(tx, group=group)}
    for rollout, value in scores.rewards.items():
        if rollout not in known:
            raise NotFound(f"group {group!r} has no rollout {rollout!r} that waits to be scored")
        if value is not None:
            rewards = final_rewards(GROUP_REWARD_ID, value, SOURCE, scores.weights)
            record_rewards(tx, run, known[rollout], rewards, rescoring=True)
    _end(tx, run, group, scores.message or _NO_SCORE)
    return Counted(True)


def expire_leases(tx: Transaction, before: float) -> int:
    """End leases that expired before a time; a group whose leases expired `max_attempts` times ends without scores."""
    overdue = _OVERDUE.all(tx, now=before)
    for row in overdue:
        if row.lost + 1 < row.max_attempts:
            _requeue(tx, row.run_id, row.group_id, lost=row.lost + 1)
        else:
            message = f"{row.lost + 1} workers were lost while they scored its group; the last was {row.worker}"
            _end(tx, row.run_id, row.group_id, message)
    return len(overdue)


def renew_all(tx: Transaction) -> None:
    """Renew every lease in full, because workers could not send heartbeats while the server was down or stalled."""
    _RENEW_ALL.run(tx, now=tx.now)


def release_all(tx: Transaction) -> None:
    """End every lease, when the workers that held them are known to be gone."""
    for row in _LEASED.all(tx):
        _requeue(tx, row.run_id, row.group_id, lost=row.lost)


def abandon(tx: Transaction, run: str, group: str, message: str) -> None:
    """Finish a group that waits to be scored, without scores."""
    if _WAITING.first(tx, group=group) is not None:
        _end(tx, run, group, message)


def _current_lease(tx: Transaction, run: str, group: str, number: int) -> Any:
    """Return the lease with this number, if it is current."""
    return _CURRENT_LEASE.first(tx, group=group, run=run, with_number=number)


def _requeue(tx: Transaction, run: str, group: str, lost: int) -> None:
    _REQUEUE.run(tx, group=group, times=lost)
    tx.emit(run, EventKind.SCORING_QUEUED, group)


def _end(tx: Transaction, run: str, group: str, message: str) -> None:
    """Finish a group; its rollouts without a reward end as `no_reward` with this message."""
    for row in _SUCCEEDED.all(tx, group=group):
        if row.reward is None:
            for update_row, id in ((_UNREWARD_ATTEMPT, row.id), (_UNREWARD_ROLLOUT, row.rollout_id)):
                update_row.run(tx, row_id=id, with_message=message.encode())
            tx.emit(run, EventKind.ATTEMPT_UNREWARDED, row.id, message=message)
    _DELETE.run(tx, group=group)
    _finish(tx, run, group)


def _finish(tx: Transaction, run: str, group: str) -> None:
    _FINISH_GROUP.run(tx, group=group, now=tx.now)
    tx.emit(run, EventKind.GROUP_FINISHED, group)


_this = scorings.c.group_id == bindparam("group")
_leased = scorings.c.expires.is_not(None)
_no_reward: dict[str, Any] = {"ending": str(Ending.NO_REWARD), "message": bindparam("with_message")}

_ADD_PENDING = insert_new(scorings)
_READY = Statement(update(scorings).where(_this).values(ready=bindparam("now")))
_next = (
    select(groups, scorings.c.number, runs.c.settings)
    .join(scorings, scorings.c.group_id == groups.c.id)
    .join(runs, runs.c.id == groups.c.run_id)
    .where(scorings.c.ready.is_not(None), scorings.c.expires.is_(None))
    .order_by(scorings.c.ready, groups.c.id)
    .limit(1)
)
_NEXT = Statement(_next)
_NEXT_OF_RUN = Statement(_next.where(groups.c.run_id == bindparam("run")))
_LEASE = Statement(
    update(scorings)
    .where(_this)
    .values(
        number=bindparam("with_number"),
        worker=bindparam("by"),
        lease_s=bindparam("length"),
        expires=bindparam("until"),
    )
)
_CURRENT_LEASE = Statement(
    select(scorings).where(
        _this, scorings.c.run_id == bindparam("run"), scorings.c.number == bindparam("with_number"), _leased
    )
)
_GROUP = Statement(select(groups.c.id).where(groups.c.id == bindparam("group"), groups.c.run_id == bindparam("run")))
_RENEW = Statement(update(scorings).where(_this).values(expires=bindparam("until")))
_RENEW_ALL = Statement(update(scorings).where(_leased).values(expires=bindparam("now") + scorings.c.lease_s))
_LEASED = Statement(select(scorings).where(_leased))
_WAITING = Statement(select(scorings.c.group_id).where(_this, scorings.c.ready.is_not(None)))
_OVERDUE = Statement(
    select(scorings, groups.c.max_attempts)
    .join(groups, groups.c.id == scorings.c.group_id)
    .where(_leased, scorings.c.expires <= bindparam("now"))
)
_REQUEUE = Statement(update(scorings).where(_this).values(expires=None, lost=bindparam("times")))
_DELETE = Statement(delete(scorings).where(_this))
_SUCCEEDED = Statement(
    select(attempts.c.id, attempts.c.rollout_id, attempts.c.reward)
    .join(rollouts, LAST_ATTEMPT)
    .where(rollouts.c.group_id == bindparam("group"), attempts.c.ending == str(Ending.SUCCEEDED))
)
_UNREWARD_ATTEMPT = Statement(update(attempts).where(attempts.c.id == bindparam("row_id")).values(**_no_reward))
_UNREWARD_ROLLOUT = Statement(update(rollouts).where(rollouts.c.id == bindparam("row_id")).values(**_no_reward))
_FINISH_GROUP = Statement(update(groups).where(groups.c.id == bindparam("group")).values(finished=bindparam("now")))
