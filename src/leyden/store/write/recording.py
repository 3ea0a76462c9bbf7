"""Records the calls, spans, rewards and credits of attempts, and the metrics and versions of runs.

Recording is idempotent: the same item again is ignored, and a different one under the same id is a `Conflict`. Credits
overwrite earlier ones, because a step that is repeated after a crash may compute other numbers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from sqlalchemy import ColumnElement, FromClause, bindparam, delete, func, select, update

from leyden.episodes import effective
from leyden.outcomes import Ending
from leyden.records import (
    Call,
    DivergedCall,
    EventKind,
    Metric,
    Reward,
    RewardKind,
    Span,
    StepCredits,
    Version,
    is_final_reward_id,
)
from leyden.store.codec import encode_json
from leyden.store.errors import Conflict, NotFound
from leyden.store.mapping import call_from_row, call_to_row, credit_to_row, decode_reward, reward_to_row, span_to_row
from leyden.store.schema import (
    WHOLE_CALLS,
    attempts,
    calls,
    credits,
    deleted_responses,
    metrics,
    rewards,
    roles,
    rollouts,
    runs,
    spans,
    versions,
)
from leyden.store.write.statements import Statement, insert, insert_new, insert_or_update
from leyden.store.write.writer import Transaction


def record_calls(tx: Transaction, run: str, attempt: str, new: Sequence[Call]) -> int:
    """Record model calls of an active attempt, parents before children."""
    rollout = require_active(tx, run, attempt)
    _put_roles(tx, run, rollout, (call.role for call in new))
    return sum(_put_call(tx, run, attempt, call) for call in new)


def record_divergence(tx: Transaction, run: str, attempt: str, at: DivergedCall) -> None:
    """Record at which call an attempt left the record that it replayed; the first time counts."""
    require_active(tx, run, attempt)
    _SET_DIVERGED.run(tx, attempt=attempt, at=encode_json(at))


def record_spans(tx: Transaction, run: str, attempt: str, new: Sequence[Span]) -> int:
    """Record spans of an active attempt. Exporters may repeat spans: the first with a span id is kept."""
    rollout = require_active(tx, run, attempt)
    _put_roles(tx, run, rollout, (span.role for span in new))
    return _ADD_SPAN.run_many(tx, (span_to_row(attempt, span) for span in new))


def record_rewards(tx: Transaction, run: str, attempt: str, new: Sequence[Reward], *, rescoring: bool = False) -> int:
    """Record rewards; on an ended attempt only when rescoring.

    A step reward without a call belongs to the latest call. The final reward has one source, which only a rescoring
    replaces; an attempt that ended as `no_reward` then becomes a success. The ids of final rewards are reserved: a step
    reward with the id of a group's final reward would keep the whole group from being scored.
    """
    if not rescoring:
        require_active(tx, run, attempt)
    else:
        _require_attempt(tx, run, attempt)
    for reward in new:
        if reward.kind is not RewardKind.FINAL and is_final_reward_id(reward.id):
            raise Conflict(f"only a final reward can have the id {reward.id!r}: give this {reward.kind} reward another")
    final = [reward for reward in new if reward.kind is RewardKind.FINAL]
    for reward in final if not rescoring else ():
        other = _OTHER_SOURCE.scalar(tx, attempt=attempt, from_source=reward.source)
        if other is not None:
            raise Conflict(
                f"attempt {attempt!r} has a final reward from {other!r} and now one from {reward.source!r}: "
                "a run has one source of the final reward"
            )
    recorded = sum(_put_reward(tx, attempt, reward) for reward in new)
    if final:
        total = _update_total(tx, attempt)
        if rescoring:
            _MARK_ROLLOUT_SUCCEEDED.run(tx, attempt=attempt)
            _MARK_ATTEMPT_SUCCEEDED.run(tx, attempt=attempt)
            _SET_ROLLOUT_REWARD.run(tx, attempt=attempt, total=total)
            tx.emit(run, EventKind.ATTEMPT_REWARDED, attempt, reward=total, source=final[-1].source)
    return recorded


def record_credits(tx: Transaction, run: str, new: StepCredits) -> int:
    """Record what a step computed for calls, in place of what the same policy computed for them before."""
    for attempt in dict.fromkeys(credit.attempt for credit in new.calls):
        _require_attempt(tx, run, attempt)
    _PUT_CREDIT.run_many(tx, (credit_to_row(new, credit) for credit in new.calls))
    return len(new.calls)


def delete_response(tx: Transaction, run: str, attempt: str, call: str) -> int:
    """Delete the response of a call for the attempt's agent. The call stays in the record."""
    require_active(tx, run, attempt)
    if not _length(tx, attempt, call):
        raise NotFound(f"attempt {attempt!r} has made no call {call!r}")
    return _DELETE_RESPONSE.run(tx, attempt_id=attempt, call_id=call)


def record_metrics(tx: Transaction, run: str, new: Sequence[Metric]) -> int:
    """Record metrics of a run's policies. One that was recorded before for the same step is replaced."""
    _require_run(tx, run)
    if new:
        _ADD_METRIC.run_many(
            tx,
            (
                {
                    "run_id": run,
                    "policy": m.policy,
                    "step": m.step,
                    "name": m.name,
                    "value": m.value,
                    "at": m.at or tx.now,
                }
                for m in new
            ),
        )
        _DELETE_OLDER_METRICS.run_many(  # only now: the number of a deleted last row would be given again
            tx, ({"run": run, "of_policy": m.policy, "with_name": m.name, "of_step": m.step} for m in new)
        )
        tx.emit(run, EventKind.METRICS, run, step=max(metric.step for metric in new))
    return len(new)


def publish_version(tx: Transaction, run: str, version: Version) -> int:
    """Record that a version of a policy's weights is served from now on."""
    _require_run(tx, run)
    if not _ADD_VERSION.run(tx, run_id=run, policy=version.policy, number=version.number, at=tx.now):
        return 0
    tx.emit(run, EventKind.VERSION_PUBLISHED, run, policy=version.policy, number=version.number)
    return 1


def require_active(tx: Transaction, run: str, attempt: str) -> str:
    """Return the rollout of an attempt; raise unless the attempt is active and belongs to the run."""
    row = _require_attempt(tx, run, attempt)
    if row.ended is not None:
        raise Conflict(f"attempt {attempt!r} ended as {row.ending}: nothing can be recorded for it any more")
    return str(row.rollout_id)


def _require_attempt(tx: Transaction, run: str, attempt: str) -> Any:
    row = _ATTEMPT.first(tx, attempt=attempt, run=run)
    if row is None:
        raise NotFound(f"no attempt {attempt!r} in run {run!r}")
    return row


def _require_run(tx: Transaction, run: str) -> None:
    if _OPEN_RUN.scalar(tx, run=run) is None:
        raise NotFound(f"no run {run!r}")


def _put_roles(tx: Transaction, run: str, rollout: str, names: Iterable[str | None]) -> None:
    """Record which roles took part in a rollout."""
    known = {name.encode(errors="replace") for name in names if name}
    _ADD_ROLE.run_many(tx, ({"run_id": run, "role": role, "rollout_id": rollout} for role in known))


def _put_call(tx: Transaction, run: str, attempt: str, call: Call) -> bool:
    length, turns = len(call.prompt_ids) + len(call.completion_ids), len(call.messages) + 1
    if call.parent is not None:
        parent = _length(tx, attempt, call.parent)
        if parent is None:
            raise NotFound(f"call {call.id!r} names parent {call.parent!r}, which attempt {attempt!r} has not made")
        for name, kept, most in (
            ("kept_ids", call.kept_ids, parent.length),
            ("kept_messages", call.kept_messages, parent.turns),
        ):
            if kept > most:
                raise Conflict(f"call {call.id!r} has {name} = {kept}, but its parent has only {most} to keep")
        length, turns = length + call.kept_ids, turns + call.kept_messages
    sampled = _sampled_call(tx, run, call.origin, call.id) if call.origin is not None else None
    row = call_to_row(attempt, call, length, turns, sampled)
    if _ADD_CALL.run(tx, **row):
        return True
    found = _CALL.first(tx, attempt=attempt, call=call.id)
    for name, value in row.items():
        if getattr(found, name) != value:
            raise Conflict(f"call {call.id!r} was recorded before with another {name}: give this one another id")
    return False


def _sampled_call(tx: Transaction, run: str, origin: str, call: str) -> Call:
    """Return the call that a replayed one repeats."""
    _require_attempt(tx, run, origin)
    row = _WHOLE_CALL.first(tx, attempt=origin, call=call)
    if row is None or row.origin is not None:
        raise NotFound(f"attempt {origin!r} has sampled no call {call!r} that could be replayed")
    return call_from_row(row)


def _put_reward(tx: Transaction, attempt: str, given: Reward) -> bool:
    reward = replace(given, at=given.at or tx.now)
    of_latest_call = given.kind is RewardKind.STEP and given.call is None and given.span is None
    if of_latest_call:
        reward = replace(reward, call=_LATEST_CALL.scalar(tx, attempt=attempt))
    elif reward.call is not None and not _length(tx, attempt, reward.call):
        raise NotFound(f"reward {reward.id!r} is for call {reward.call!r}, which attempt {attempt!r} has not made")
    if _ADD_REWARD.run(tx, **reward_to_row(attempt, reward)):
        return True
    before = decode_reward(_REWARD.scalar(tx, attempt=attempt, reward=reward.id))
    # There may have been another latest call when it was recorded.
    if given != replace(before, at=given.at, call=None if of_latest_call else before.call):
        raise Conflict(f"reward {reward.id!r} was recorded before as {before.value:g}: give this one another id")
    return False


def _length(tx: Transaction, attempt: str, call: str) -> Any:
    """Return how many tokens and messages of a call a child can keep; None if there is no such call."""
    return _LENGTH.first(tx, attempt=attempt, call=call)


def _update_total(tx: Transaction, attempt: str) -> float:
    """Store the current final reward with the attempt, for lists and means."""
    given = [decode_reward(row.body) for row in _FINAL_REWARDS.all(tx, attempt=attempt)]
    total = sum(reward.weight * reward.value for reward in effective(given))
    _SET_REWARD.run(tx, attempt=attempt, total=total)
    return total


_this_attempt = attempts.c.id == bindparam("attempt")
_this_call = (calls.c.attempt_id == bindparam("attempt"), calls.c.id == bindparam("call"))
_of_attempt = rewards.c.attempt_id == bindparam("attempt")
_final = rewards.c.kind == str(RewardKind.FINAL)

_OPEN_RUN = Statement(select(runs.c.id).where(runs.c.id == bindparam("run"), runs.c.state == "open"))
_ATTEMPT = Statement(
    select(attempts.c.ended, attempts.c.ending, attempts.c.rollout_id).where(
        _this_attempt, attempts.c.run_id == bindparam("run")
    )
)
_ADD_CALL = insert_new(calls, "parent", "origin", "prompt_ids", "completion_ids", "logprobs")
_CALL = Statement(select(calls).where(*_this_call))
_WHOLE_CALL = Statement(WHOLE_CALLS.where(*_this_call))
_SET_DIVERGED = Statement(
    update(attempts).where(_this_attempt, attempts.c.diverged.is_(None)).values(diverged=bindparam("at"))
)
_LENGTH = Statement(select(calls.c.length, calls.c.turns).where(*_this_call))
_LATEST_CALL = Statement(
    select(calls.c.id).where(calls.c.attempt_id == bindparam("attempt")).order_by(calls.c.seq.desc()).limit(1)
)
_ADD_SPAN = insert_new(spans)
_ADD_REWARD = insert_new(rewards)
_REWARD = Statement(select(rewards.c.body).where(_of_attempt, rewards.c.id == bindparam("reward")))
_FINAL_REWARDS = Statement(select(rewards.c.body).where(_of_attempt, _final).order_by(rewards.c.seq))
_OTHER_SOURCE = Statement(
    select(rewards.c.source).where(_of_attempt, _final, rewards.c.source != bindparam("from_source")).limit(1)
)
_SET_REWARD = Statement(update(attempts).where(_this_attempt).values(reward=bindparam("total")))
_unrewarded = (_this_attempt, attempts.c.ending == str(Ending.NO_REWARD))
_succeeded = {"ending": str(Ending.SUCCEEDED), "message": b""}
_MARK_ATTEMPT_SUCCEEDED = Statement(update(attempts).where(*_unrewarded).values(_succeeded))
_MARK_ROLLOUT_SUCCEEDED = Statement(
    update(rollouts)
    .where(
        rollouts.c.id == select(attempts.c.rollout_id).where(*_unrewarded).scalar_subquery(),
        rollouts.c.ending == str(Ending.NO_REWARD),
    )
    .values(_succeeded)
)
_PUT_CREDIT = insert_or_update(credits, "value", "advantage", "weight")
_SET_ROLLOUT_REWARD = Statement(
    update(rollouts)
    .where(
        rollouts.c.id == select(attempts.c.rollout_id).where(_this_attempt).scalar_subquery(),
        rollouts.c.attempts == select(attempts.c.number).where(_this_attempt).scalar_subquery(),
        rollouts.c.ending == str(Ending.SUCCEEDED),
    )
    .values(reward=bindparam("total"))
)
_ADD_ROLE = insert_new(roles)


def _one_metric(table: FromClause) -> tuple[ColumnElement[bool], ...]:
    return (
        table.c.run_id == bindparam("run"),
        table.c.policy == bindparam("of_policy"),
        table.c.name == bindparam("with_name"),
        table.c.step == bindparam("of_step"),
    )


_all_metrics = metrics.alias()
_newest = select(func.max(_all_metrics.c.seq)).where(*_one_metric(_all_metrics)).scalar_subquery()
_DELETE_OLDER_METRICS = Statement(delete(metrics).where(*_one_metric(metrics), metrics.c.seq < _newest))
_DELETE_RESPONSE = insert_new(deleted_responses)
_ADD_METRIC = insert(metrics)
_ADD_VERSION = insert_new(versions)
