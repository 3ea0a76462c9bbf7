"""How attempts end. Each ends once; what becomes of its rollout is read from the outcome table."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, func, select, update

from leyden.outcomes import MEANING, RETRY_BACKOFF, Ending, Outcome, Retry
from leyden.records import EventKind, Rollout
from leyden.store import scoring
from leyden.store.codec import encode_json
from leyden.store.errors import Conflict, NotFound
from leyden.store.mapping import outcome_from, rollout_from
from leyden.store.queue import requeue, seen
from leyden.store.recording import record_rewards
from leyden.store.schema import ALIVE, attempts, calls, groups, rollouts
from leyden.store.statements import Statement
from leyden.store.writer import Transaction
from leyden.wire import EndedAttempt, FinishReply, FinishRequest, HeartbeatReply

NO_REWARD = Outcome(
    Ending.NO_REWARD,
    "the attempt succeeded without a final reward: return a number from the agent, or configure `reward`",
)


def beat(tx: Transaction, worker: str, ids: Sequence[str], run: str | None) -> HeartbeatReply:
    """Prolong the leases of a worker's attempts (of one run, or all), and tell it which of them are over."""
    expires: dict[str, float] = {}
    ended: list[EndedAttempt] = []
    for id in ids:
        row = _LEASE.first(tx, attempt=id)
        if row is None or row.worker != worker or run not in (None, row.run_id):
            ended.append(EndedAttempt(id, None))
        elif row.ended is not None:
            ended.append(EndedAttempt(id, outcome_from(row)))
        else:
            expires[id] = tx.now + row.lease_s
    _PROLONG.run_many(tx, ({"attempt": id, "moment": moment} for id, moment in expires.items()))
    seen(tx, [worker])
    return HeartbeatReply(expires, tuple(ended))


def expire(tx: Transaction) -> int:
    """End every attempt whose lease has run out."""
    overdue = _OVERDUE.all(tx, now=tx.now)
    for row in overdue:
        message = f"worker {row.worker} sent no heartbeat for {row.lease_s:g} s: it died, or cannot reach the server"
        _end(tx, row, Outcome(Ending.LOST, message))
    return len(overdue)


def grace(tx: Transaction) -> None:
    """Prolong every lease by its whole length: nobody could send heartbeats while the server was away."""
    _PROLONG_ALL.run(tx, now=tx.now)


def finish(tx: Transaction, run: str, attempt: str, report: FinishRequest) -> FinishReply:
    """End an attempt, once: a repeated or late report goes into the log and changes nothing else."""
    row = _ATTEMPT.first(tx, attempt=attempt, run=run)
    if row is None:
        raise NotFound(f"no attempt {attempt!r} in run {run!r}")
    if row.ended is not None:
        tx.emit(
            run, EventKind.ATTEMPT_LATE, attempt, outcome=report.outcome, result=report.result, rewards=report.rewards
        )
        standing = outcome_from(row)
        assert standing is not None
        return FinishReply(False, standing, _rollout(tx, row.rollout_id))
    if report.rewards:
        record_rewards(tx, run, attempt, report.rewards)
    outcome = report.outcome
    if outcome.ending is Ending.SUCCEEDED:
        rewarded = _REWARD.scalar(tx, attempt=attempt) is not None
        if report.awaits_group and rewarded:
            raise Conflict(
                f"attempt {attempt!r} has a final reward, and its group is scored together: "
                "a run has one source of the final reward"
            )
        if report.awaits_group:
            scoring.expect(tx, run, row.group_id)
        elif not rewarded:
            outcome = NO_REWARD
    _end(tx, row, outcome, report.result, report.output, report.retry)
    return FinishReply(True, outcome, _rollout(tx, row.rollout_id))


def uncharge(tx: Transaction, attempt: str, outcome: Outcome) -> None:
    """End a live attempt that came to nothing through no fault of its rollout."""
    row = _LEASE.first(tx, attempt=attempt)
    if row is not None and row.ended is None:
        _end(tx, _ATTEMPT.first(tx, attempt=attempt, run=row.run_id), outcome, retry=Retry.FREE)


def cancel_group(tx: Transaction, run: str, group: str) -> int:
    """End what is unfinished of a group, at once; the keys of its attempts die with it."""
    if _GROUP.first(tx, group=group, run=run) is None:
        raise NotFound(f"no group {group!r} in run {run!r}")
    cancelled = _cancel(tx, _UNFINISHED_OF_GROUP.all(tx, group=group), f"group {group} was cancelled")
    scoring.give_up(tx, run, group, f"group {group} was cancelled before it was scored")
    return cancelled


def cancel_rollout(tx: Transaction, run: str, rollout: str) -> int:
    """End a rollout at once, if it is unfinished; the key of its attempt dies with it."""
    row = _ROLLOUT.first(tx, rollout=rollout)
    if row is None or row.run_id != run:
        raise NotFound(f"no rollout {rollout!r} in run {run!r}")
    return _cancel(tx, [row] if row.state != "finished" else [], f"rollout {rollout} was cancelled")


def _cancel(tx: Transaction, unfinished: Sequence[Any], message: str) -> int:
    outcome = Outcome(Ending.CANCELLED, message)
    for row in unfinished:
        alive = _ALIVE_OF_ROLLOUT.first(tx, rollout=row.id)
        if alive is not None:
            _end(tx, alive, outcome)
        else:
            _finish_rollout(tx, row.run_id, row.id, row.group_id, outcome)
    return len(unfinished)


def _end(
    tx: Transaction,
    row: Any,
    outcome: Outcome,
    result: Any = None,
    output: str = "",
    retry: Retry = Retry.CHARGED,
) -> None:
    """End a live attempt, and decide by the outcome table what becomes of its rollout."""
    ending = str(outcome.ending)
    _END_ATTEMPT.run(
        tx,
        attempt=row.id,
        now=tx.now,
        with_ending=ending,
        with_message=outcome.message.encode(),
        with_result=None if result is None else encode_json(result),
        with_output=output.encode() or None,
    )
    tx.emit(row.run_id, EventKind.ATTEMPT_ENDED, row.id, rollout=row.rollout_id, ending=ending, message=outcome.message)
    if not (MEANING[outcome.ending].retried and _try_again(tx, row, retry)):
        _finish_rollout(tx, row.run_id, row.rollout_id, row.group_id, outcome)


def _try_again(tx: Transaction, row: Any, retry: Retry) -> bool:
    """Queue a rollout again, if it has an attempt left. What costs it none raises the number that it may have."""
    if retry is Retry.FREE or (retry is Retry.ALONE and not row.alone):
        _ALLOW_ONE_MORE.run(tx, rollout=row.rollout_id)
    elif row.number >= row.max_attempts:
        return False
    not_before = tx.now if retry is Retry.FREE else tx.now + RETRY_BACKOFF.limit_s(row.number)
    requeue(tx, row.rollout_id, not_before, alone=bool(row.alone) or retry is Retry.ALONE)
    tx.emit(row.run_id, EventKind.ROLLOUT_QUEUED, row.rollout_id, after=row.id, not_before=not_before)
    return True


def _finish_rollout(tx: Transaction, run: str, rollout: str, group: str, outcome: Outcome) -> None:
    ending = str(outcome.ending)
    _FINISH_ROLLOUT.run(tx, rollout=rollout, now=tx.now, with_ending=ending, with_message=outcome.message.encode())
    tx.emit(run, EventKind.ROLLOUT_FINISHED, rollout, ending=ending)
    counted = _COUNT_DONE.first(tx, group=group)
    if counted.done == counted.size:
        scoring.close(tx, run, group)


def _rollout(tx: Transaction, rollout: str) -> Rollout:
    return rollout_from(_ROLLOUT.first(tx, rollout=rollout))


_attempt = attempts.c.id == bindparam("attempt")
_with_rollout = select(attempts, rollouts.c.group_id, rollouts.c.max_attempts, rollouts.c.alone).join(
    rollouts, rollouts.c.id == attempts.c.rollout_id
)
_calls_made = calls.c.attempt_id == bindparam("attempt")
_this_rollout = rollouts.c.id == bindparam("rollout")
_this_group = groups.c.id == bindparam("group")

_LEASE = Statement(select(attempts).where(_attempt))
_ATTEMPT = Statement(_with_rollout.where(_attempt, attempts.c.run_id == bindparam("run")))
_OVERDUE = Statement(_with_rollout.where(ALIVE, attempts.c.expires <= bindparam("now")))
_ALIVE_OF_ROLLOUT = Statement(_with_rollout.where(attempts.c.rollout_id == bindparam("rollout"), ALIVE))
_PROLONG = Statement(update(attempts).where(_attempt).values(expires=bindparam("moment")))
_PROLONG_ALL = Statement(update(attempts).where(ALIVE).values(expires=bindparam("now") + attempts.c.lease_s))
_REWARD = Statement(select(attempts.c.reward).where(_attempt))
_END_ATTEMPT = Statement(
    update(attempts)
    .where(_attempt)
    .values(
        ended=bindparam("now"),
        ending=bindparam("with_ending"),
        message=bindparam("with_message"),
        result=bindparam("with_result"),
        output=bindparam("with_output"),
        calls=select(func.count()).where(_calls_made).scalar_subquery(),
        tokens=select(func.coalesce(func.sum(calls.c.sampled), 0)).where(_calls_made).scalar_subquery(),
    )
)
_ALLOW_ONE_MORE = Statement(update(rollouts).where(_this_rollout).values(max_attempts=rollouts.c.max_attempts + 1))
_ROLLOUT = Statement(select(rollouts).where(_this_rollout))
_FINISH_ROLLOUT = Statement(
    update(rollouts)
    .where(_this_rollout)
    .values(
        state="finished",
        finished=bindparam("now"),
        ending=bindparam("with_ending"),
        message=bindparam("with_message"),
    )
)
_GROUP = Statement(select(groups).where(_this_group, groups.c.run_id == bindparam("run")))
_UNFINISHED_OF_GROUP = Statement(
    select(rollouts).where(rollouts.c.group_id == bindparam("group"), rollouts.c.state != "finished")
)
_COUNT_DONE = Statement(
    update(groups).where(_this_group).values(done=groups.c.done + 1).returning(groups.c.done, groups.c.size)
)
