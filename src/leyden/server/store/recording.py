"""What an attempt leaves behind: calls, spans, rewards. Each is recorded once; sent again, it is passed over if it is
the same and refused if it is not.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Row, Table, bindparam, insert, select, update

from leyden.records import Call, Metric, Reward, RewardKind, Span, Version
from leyden.server.store.database import insert_new
from leyden.server.store.errors import Conflict, NotFound
from leyden.server.store.rows import call_row, decode_reward, reward_row, span_row
from leyden.server.store.schema import attempts, calls, metrics, rewards, runs, spans, versions
from leyden.server.store.writer import Transaction


def record_calls(tx: Transaction, run: str, attempt: str, new: Sequence[Call]) -> int:
    """Record model calls of a live attempt, parents before children."""
    require_alive(tx, run, attempt)
    return sum(_put_call(tx, attempt, call) for call in new)


def record_spans(tx: Transaction, run: str, attempt: str, new: Sequence[Span]) -> int:
    """Record spans of a live attempt. Exporters repeat what they are unsure of: the first of a span id stands."""
    require_alive(tx, run, attempt)
    return insert_new(tx.connection, spans, *(span_row(attempt, span) for span in new))


def record_rewards(tx: Transaction, run: str, attempt: str, new: Sequence[Reward], *, rescoring: bool = False) -> int:
    """Record rewards; on an attempt that has ended only when rescoring.

    A step reward that names no call belongs to the latest. The final reward has one source, except that a rescoring
    replaces it.
    """
    if not rescoring:
        require_alive(tx, run, attempt)
    elif tx.connection.execute(_ATTEMPT, {"attempt": attempt, "run": run}).first() is None:
        raise NotFound(f"no attempt {attempt!r} in run {run!r}")
    final = [reward for reward in new if reward.kind is RewardKind.FINAL]
    for reward in final if not rescoring else ():
        other = tx.connection.scalar(_OTHER_SOURCE, {"attempt": attempt, "given_by": reward.source})
        if other is not None:
            raise Conflict(
                f"attempt {attempt!r} has a final reward from {other!r} and now one from {reward.source!r}: "
                "a run has one source of the final reward"
            )
    recorded = sum(_put_reward(tx, attempt, reward) for reward in new)
    if final:
        _sum_up(tx, attempt)
    return recorded


def record_metrics(tx: Transaction, run: str, new: Sequence[Metric]) -> int:
    """Record numbers of a run."""
    _require_run(tx, run)
    if new:
        tx.connection.execute(
            insert(metrics),
            [{"run_id": run, "step": m.step, "name": m.name, "value": m.value, "at": m.at or tx.now} for m in new],
        )
        tx.emit(run, "metrics", run, step=max(metric.step for metric in new))
    return len(new)


def publish_version(tx: Transaction, run: str, version: Version) -> int:
    """Record that a version of a policy's weights is being served from now on."""
    _require_run(tx, run)
    row = {"run_id": run, "policy": version.policy, "number": version.number, "at": tx.now}
    if not insert_new(tx.connection, versions, row):
        return 0
    tx.emit(run, "version.published", run, policy=version.policy, number=version.number)
    return 1


def require_alive(tx: Transaction, run: str, attempt: str) -> None:
    """Refuse to go on with an attempt that is over, or of another run."""
    row = tx.connection.execute(_ATTEMPT, {"attempt": attempt, "run": run}).first()
    if row is None:
        raise NotFound(f"no attempt {attempt!r} in run {run!r}")
    if row.ended is not None:
        raise Conflict(f"attempt {attempt!r} ended as {row.ending}: nothing can be added to it")


def _require_run(tx: Transaction, run: str) -> None:
    if tx.connection.scalar(_OPEN_RUN, {"run": run}) is None:
        raise NotFound(f"no run {run!r}")


def _put_call(tx: Transaction, attempt: str, call: Call) -> bool:
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
    row = call_row(attempt, call, length, turns)
    found = _insert(tx, calls, row)
    if found is None:
        return True
    for name, value in row.items():
        if getattr(found, name) != value:
            raise Conflict(f"call {call.id!r} was recorded before with another {name}: give this one another id")
    return False


def _put_reward(tx: Transaction, attempt: str, given: Reward) -> bool:
    reward = replace(given, at=given.at or tx.now)
    if reward.kind is RewardKind.STEP and reward.call is None and reward.span is None:
        reward = replace(reward, call=tx.connection.scalar(_LATEST_CALL, {"attempt": attempt}))
    elif reward.call is not None and not _length(tx, attempt, reward.call):
        raise NotFound(f"reward {reward.id!r} is for call {reward.call!r}, which attempt {attempt!r} has not made")
    found = _insert(tx, rewards, reward_row(attempt, reward))
    if found is None:
        return True
    before = decode_reward(found.body)
    if before != replace(given, at=before.at, call=given.call or before.call):
        raise Conflict(f"reward {reward.id!r} was recorded before as {before.value:g}: give this one another id")
    return False


def _insert(tx: Transaction, table: Table, row: dict[str, Any]) -> Row[Any] | None:
    """Insert a row of an attempt, or return the one that is there already."""
    if insert_new(tx.connection, table, row):
        return None
    same = (table.c.attempt_id == row["attempt_id"], table.c.id == row["id"])
    return tx.connection.execute(select(table).where(*same)).one()


def _length(tx: Transaction, attempt: str, call: str) -> Any:
    """How much of a call a child can keep; None where there is no such call."""
    return tx.connection.execute(_LENGTH, {"attempt": attempt, "call": call}).first()


def _sum_up(tx: Transaction, attempt: str) -> None:
    """Write the final reward in force beside the attempt, where lists and means find it."""
    final = (decode_reward(body) for body in tx.connection.scalars(_FINAL_REWARDS, {"attempt": attempt}))
    standing = {reward.name: reward for reward in final}
    total = sum(reward.weight * reward.value for reward in standing.values())
    tx.connection.execute(_SET_REWARD, {"rewarded": attempt, "total": total})


_OPEN_RUN = select(runs.c.id).where(runs.c.id == bindparam("run"), runs.c.state == "open")
_ATTEMPT = select(attempts.c.ended, attempts.c.ending).where(
    attempts.c.id == bindparam("attempt"), attempts.c.run_id == bindparam("run")
)
_LENGTH = select(calls.c.length, calls.c.turns).where(
    calls.c.attempt_id == bindparam("attempt"), calls.c.id == bindparam("call")
)
_LATEST_CALL = (
    select(calls.c.id).where(calls.c.attempt_id == bindparam("attempt")).order_by(calls.c.seq.desc()).limit(1)
)
_FINAL_REWARDS = (
    select(rewards.c.body)
    .where(rewards.c.attempt_id == bindparam("attempt"), rewards.c.kind == RewardKind.FINAL)
    .order_by(rewards.c.seq)
)
_OTHER_SOURCE = (
    select(rewards.c.source)
    .where(
        rewards.c.attempt_id == bindparam("attempt"),
        rewards.c.kind == RewardKind.FINAL,
        rewards.c.source != bindparam("given_by"),
    )
    .limit(1)
)
_SET_REWARD = update(attempts).where(attempts.c.id == bindparam("rewarded")).values(reward=bindparam("total"))
