"""Heartbeats and ends of attempts. An attempt ends once; the outcome table decides what happens to its rollout."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, case, func, select, update

from leyden.api.wire import EndedAttempt, FinishReply, FinishRequest, HeartbeatReply
from leyden.outcomes import MEANING, RETRY_BACKOFF, Ending, Outcome, Retry
from leyden.records import EventKind, Purpose, Rollout
from leyden.store.codec import encode_json
from leyden.store.errors import Conflict, NotFound
from leyden.store.mapping import decode_settings, outcome_from_row, rollout_from_row
from leyden.store.schema import ACTIVE, LAST_ATTEMPT, PARKED, attempts, calls, groups, rollouts, runs
from leyden.store.write import scoring
from leyden.store.write.queue import mark_seen, requeue
from leyden.store.write.recording import record_rewards
from leyden.store.write.statements import Statement
from leyden.store.write.writer import Transaction

NO_REWARD = Outcome(
    Ending.NO_REWARD,
    "the attempt succeeded without a final reward: return a number from the agent, or configure `reward`",
)


def heartbeat(tx: Transaction, worker: str, ids: Sequence[str], run: str | None = None) -> HeartbeatReply:
    """Renew the leases of a worker's attempts (of one run, or all), and report which of them have ended."""
    expires: dict[str, float] = {}
    ended: list[EndedAttempt] = []
    for id in ids:
        row = _LEASE.first(tx, attempt=id)
        if row is None or row.worker != worker or run not in (None, row.run_id):
            ended.append(EndedAttempt(id, None))
        elif row.ended is not None:
            ended.append(EndedAttempt(id, outcome_from_row(row)))
        else:
            expires[id] = tx.now + row.lease_s
    _RENEW.run_many(tx, ({"attempt": id, "until": until} for id, until in expires.items()))
    mark_seen(tx, [worker])
    return HeartbeatReply(expires, tuple(ended))


def expire_leases(tx: Transaction, before: float) -> int:
    """End every attempt whose lease expired before a time."""
    overdue = _OVERDUE.all(tx, now=before)
    for row in overdue:
        message = f"worker {row.worker} sent no heartbeat for {row.lease_s:g} s: it died, or cannot reach the server"
        _end(tx, row, Outcome(Ending.LOST, message))
    return len(overdue)


def renew_all(tx: Transaction) -> None:
    """Renew every lease in full, because workers could not send heartbeats while the server was down or stalled."""
    _RENEW_ALL.run(tx, now=tx.now)


def finish(tx: Transaction, run: str, attempt: str, report: FinishRequest) -> FinishReply:
    """End an attempt, once. A repeated or late report is logged and changes nothing else."""
    row = _ATTEMPT.first(tx, attempt=attempt, run=run)
    if row is None:
        raise NotFound(f"no attempt {attempt!r} in run {run!r}")
    if row.ended is not None:
        tx.emit(
            run, EventKind.ATTEMPT_LATE, attempt, outcome=report.outcome, result=report.result, rewards=report.rewards
        )
        first_outcome = outcome_from_row(row)
        assert first_outcome is not None
        return FinishReply(False, first_outcome, _rollout(tx, row.rollout_id))
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
            scoring.add_pending(tx, run, row.group_id)
        elif not rewarded:
            outcome = NO_REWARD
    _end(tx, row, outcome, report.result, report.output, report.retry)
    return FinishReply(True, outcome, _rollout(tx, row.rollout_id))


def release(tx: Transaction, attempt: str, outcome: Outcome) -> None:
    """End an active attempt that failed through no fault of its rollout; it does not count against `max_attempts`."""
    row = _LEASE.first(tx, attempt=attempt)
    if row is not None and row.ended is None:
        _end(tx, _ATTEMPT.first(tx, attempt=attempt, run=row.run_id), outcome, retry=Retry.FREE)


def park(tx: Transaction, run: str) -> None:
    """Lease no rollout of a run until its group is requested again, also none whose running attempt is retried.

    Attempts of evaluations are released: the weights that are served next may be others.
    """
    _PARK.run(tx, run=run)
    for row in _ACTIVE_IN_EVALUATIONS.all(tx, run=run):
        release(tx, row.id, Outcome(Ending.LOST, "the training was resumed, and its evaluation is made again"))


def cancel_group(tx: Transaction, run: str, group: str) -> int:
    """Cancel the unfinished rollouts of a group; the keys of their attempts stop working at once."""
    if _GROUP.first(tx, group=group, run=run) is None:
        raise NotFound(f"no group {group!r} in run {run!r}")
    cancelled = _cancel(tx, _UNFINISHED_OF_GROUP.all(tx, group=group), f"group {group} was cancelled")
    scoring.abandon(tx, run, group, f"group {group} was cancelled before it was scored")
    return cancelled


def cancel_rollout(tx: Transaction, run: str, rollout: str) -> int:
    """Cancel a rollout if it is unfinished; the key of its attempt stops working at once."""
    row = _ROLLOUT.first(tx, rollout=rollout)
    if row is None or row.run_id != run:
        raise NotFound(f"no rollout {rollout!r} in run {run!r}")
    return _cancel(tx, [row] if row.state != "finished" else [], f"rollout {rollout} was cancelled")


def _cancel(tx: Transaction, unfinished: Sequence[Any], message: str) -> int:
    outcome = Outcome(Ending.CANCELLED, message)
    for row in unfinished:
        active = _ACTIVE_OF_ROLLOUT.first(tx, rollout=row.id)
        if active is not None:
            _end(tx, active, outcome)
        else:
            _finish_rollout(tx, row.run_id, row.id, row.group_id, outcome)
    return len(unfinished)


def _end(
    tx: Transaction, row: Any, outcome: Outcome, result: Any = None, output: str = "", retry: Retry = Retry.CHARGED
) -> None:
    """End an active attempt; the outcome table decides whether its rollout is retried or finished."""
    ending = str(outcome.ending)
    if retry is Retry.FREE_ONCE:
        retry = Retry.CHARGED if _ENGINE_ERRORS.scalar(tx, rollout=row.rollout_id, attempt=row.id) else Retry.FREE
    _END_ATTEMPT.run(
        tx,
        attempt=row.id,
        now=tx.now,
        free=int(retry is Retry.FREE),
        with_ending=ending,
        with_message=outcome.message.encode(),
        with_result=None if result is None else encode_json(result),
        with_output=output.encode() or None,
    )
    tx.emit(row.run_id, EventKind.ATTEMPT_ENDED, row.id, rollout=row.rollout_id, ending=ending, message=outcome.message)
    if not (MEANING[outcome.ending].retried and _retry(tx, row, retry)):
        _finish_rollout(tx, row.run_id, row.rollout_id, row.group_id, outcome)


def _retry(tx: Transaction, row: Any, retry: Retry) -> bool:
    """Queue a rollout again if it has an attempt left; a free retry raises its `max_attempts`."""
    if retry is Retry.FREE or (retry is Retry.ALONE and not row.alone):
        _RAISE_MAX_ATTEMPTS.run(tx, rollout=row.rollout_id)
    elif row.number >= row.max_attempts:
        return False
    not_before = tx.now if retry is Retry.FREE else tx.now + RETRY_BACKOFF.limit_s(row.number)
    requeue(tx, row.rollout_id, not_before, alone=bool(row.alone) or retry is Retry.ALONE)
    tx.emit(row.run_id, EventKind.ROLLOUT_QUEUED, row.rollout_id, after=row.id, not_before=not_before)
    return True


def _finish_rollout(tx: Transaction, run: str, rollout: str, group: str, outcome: Outcome) -> None:
    ending = str(outcome.ending)
    failed = MEANING[outcome.ending].reward == "failure_reward"
    _FINISH_ROLLOUT.run(
        tx,
        rollout=rollout,
        now=tx.now,
        with_ending=ending,
        with_message=outcome.message.encode(),
        with_reward=decode_settings(_SETTINGS.scalar(tx, run=run)).failure_reward if failed else None,
        given=int(MEANING[outcome.ending].reward == "given"),
    )
    tx.emit(run, EventKind.ROLLOUT_FINISHED, rollout, ending=ending)
    counted = _COUNT_DONE.first(tx, group=group)
    if counted.done == counted.size:
        scoring.close_group(tx, run, group)


def _rollout(tx: Transaction, rollout: str) -> Rollout:
    return rollout_from_row(_ROLLOUT.first(tx, rollout=rollout))


_attempt = attempts.c.id == bindparam("attempt")
_with_rollout = select(attempts, rollouts.c.group_id, rollouts.c.max_attempts, rollouts.c.alone).join(
    rollouts, rollouts.c.id == attempts.c.rollout_id
)
_calls_made = calls.c.attempt_id == bindparam("attempt")
_this_rollout = rollouts.c.id == bindparam("rollout")
_this_group = groups.c.id == bindparam("group")

_LEASE = Statement(select(attempts).where(_attempt))
_ATTEMPT = Statement(_with_rollout.where(_attempt, attempts.c.run_id == bindparam("run")))
_OVERDUE = Statement(_with_rollout.where(ACTIVE, attempts.c.expires <= bindparam("now")))
_ACTIVE_OF_ROLLOUT = Statement(_with_rollout.where(attempts.c.rollout_id == bindparam("rollout"), ACTIVE))
_ACTIVE_IN_EVALUATIONS = Statement(
    _with_rollout.where(ACTIVE, attempts.c.run_id == bindparam("run"), rollouts.c.purpose != str(Purpose.TRAIN))
)
_PARK = Statement(
    update(rollouts)
    .where(rollouts.c.state != "finished", rollouts.c.run_id == bindparam("run"))
    .values(position=PARKED)
)
_RENEW = Statement(update(attempts).where(_attempt).values(expires=bindparam("until")))
_RENEW_ALL = Statement(update(attempts).where(ACTIVE).values(expires=bindparam("now") + attempts.c.lease_s))
_REWARD = Statement(select(attempts.c.reward).where(_attempt))
_END_ATTEMPT = Statement(
    update(attempts)
    .where(_attempt)
    .values(
        ended=bindparam("now"),
        blameless=bindparam("free"),
        ending=bindparam("with_ending"),
        message=bindparam("with_message"),
        result=bindparam("with_result"),
        output=bindparam("with_output"),
        calls=select(func.count()).where(_calls_made).scalar_subquery(),
        tokens=select(func.coalesce(func.sum(calls.c.sampled), 0)).where(_calls_made).scalar_subquery(),
    )
)
_ENGINE_ERRORS = Statement(  # of earlier attempts
    select(func.count()).where(
        attempts.c.rollout_id == bindparam("rollout"),
        attempts.c.ending == str(Ending.ENGINE_ERROR),
        attempts.c.id != bindparam("attempt"),
    )
)
_RAISE_MAX_ATTEMPTS = Statement(update(rollouts).where(_this_rollout).values(max_attempts=rollouts.c.max_attempts + 1))
_ROLLOUT = Statement(select(rollouts).where(_this_rollout))
_FINISH_ROLLOUT = Statement(
    update(rollouts)
    .where(_this_rollout)
    .values(
        state="finished",
        finished=bindparam("now"),
        ending=bindparam("with_ending"),
        message=bindparam("with_message"),
        reward=case(
            (bindparam("given") == 1, select(attempts.c.reward).where(LAST_ATTEMPT).scalar_subquery()),
            else_=bindparam("with_reward"),
        ),
        calls=select(attempts.c.calls).where(LAST_ATTEMPT).scalar_subquery(),
        tokens=select(attempts.c.tokens).where(LAST_ATTEMPT).scalar_subquery(),
    )
)
_SETTINGS = Statement(select(runs.c.settings).where(runs.c.id == bindparam("run")))
_GROUP = Statement(select(groups).where(_this_group, groups.c.run_id == bindparam("run")))
_UNFINISHED_OF_GROUP = Statement(
    select(rollouts).where(rollouts.c.group_id == bindparam("group"), rollouts.c.state != "finished")
)
_COUNT_DONE = Statement(
    update(groups).where(_this_group).values(done=groups.c.done + 1).returning(groups.c.done, groups.c.size)
)
