"""Converts between table rows and records."""

from typing import Any

import msgspec
from msgspec.structs import replace

from leyden.api.wire import ListedRollout
from leyden.outcomes import Ending, Outcome
from leyden.records import (
    Attempt,
    Call,
    CallCredit,
    CallStatus,
    DivergedCall,
    Group,
    Origin,
    Purpose,
    Reward,
    Rollout,
    Run,
    RunSettings,
    Span,
    State,
    StepCredits,
    Task,
)
from leyden.store.codec import decode_json, encode_json, pack_floats, pack_ids, unpack_floats, unpack_ids

decode_settings = msgspec.json.Decoder(RunSettings).decode
decode_span = msgspec.json.Decoder(Span).decode
decode_reward = msgspec.json.Decoder(Reward).decode
_decode_origin = msgspec.json.Decoder(Origin).decode
_decode_diverged = msgspec.json.Decoder(DivergedCall).decode

_COLUMNS = (
    *("id", "parent", "kept_ids", "kept_messages", "status", "origin"),
    *("prompt_ids", "completion_ids", "logprobs"),
)
_CallBody = msgspec.defstruct(
    "_CallBody",
    [(each.name, each.type, each.default) for each in msgspec.structs.fields(Call) if each.name not in _COLUMNS],
    frozen=True,
    omit_defaults=True,
    rename={"prompt_origin": "made", "origin_reason": "made_why"},
)
"""The fields of a call that no query filters by, stored as one JSON document."""
_BODY_FIELDS = _CallBody.__struct_fields__
_decode_body = msgspec.json.Decoder(_CallBody).decode
_OWN_FIELDS = ("role", "span", "started", "ended", "waits")
"""The fields in which a replayed call may differ from the one that was sampled, if it refers to that."""


def run_from_row(row: Any) -> Run:
    """Build a run."""
    return Run(row.id, decode_settings(row.settings), decode_json(row.config), row.created)


def task_from_row(row: Any) -> Task:
    """Build a task from a row with `task_id` and `input`."""
    return Task(row.task_id, decode_json(row.input))


def group_from_row(row: Any) -> Group:
    """Build a group."""
    return Group(
        row.id,
        row.run_id,
        row.task_id,
        Purpose(row.purpose),
        row.size,
        row.priority,
        row.created,
        row.finished,
        origin_from_row(row),
    )


def outcome_from_row(row: Any) -> Outcome | None:
    """Build the outcome of a rollout or an attempt; None if it has not ended."""
    return None if row.ending is None else Outcome(Ending(row.ending), (row.message or b"").decode())


def origin_from_row(row: Any) -> Origin | None:
    """Build what a rollout or an attempt replays."""
    return None if row.origin is None else _decode_origin(row.origin)


def rollout_from_row(row: Any) -> Rollout:
    """Build a rollout."""
    return Rollout(
        id=row.id,
        run=row.run_id,
        group=row.group_id,
        task=row.task_id,
        index=row.place,
        purpose=Purpose(row.purpose),
        state=State(row.state),
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        created=row.created,
        finished=row.finished,
        outcome=outcome_from_row(row),
        step=row.step,
        origin=origin_from_row(row),
    )


def listed_rollout_from_row(row: Any) -> ListedRollout:
    """Build a rollout for a list."""
    return ListedRollout(
        **msgspec.structs.asdict(rollout_from_row(row)), reward=row.reward, calls=row.calls, tokens=row.tokens
    )


def attempt_from_row(row: Any) -> Attempt:
    """Build an attempt."""
    return Attempt(
        id=row.id,
        run=row.run_id,
        rollout=row.rollout_id,
        number=row.number,
        worker=row.worker,
        pool=row.pool,
        started=row.started,
        expires=row.expires,
        ended=row.ended,
        outcome=outcome_from_row(row),
        result=None if row.result is None else decode_json(row.result),
        origin=origin_from_row(row),
        diverged=None if row.diverged is None else _decode_diverged(row.diverged),
    )


def call_to_row(attempt: str, call: Call, length: int, turns: int, sampled: Call | None = None) -> dict[str, Any]:
    """Convert a call; `length` and `turns` are how many tokens and messages a child call can keep.

    A replayed call is stored without what it has in common with the one that was `sampled`. If it was recorded
    differently, after other calls say, it is stored whole.
    """
    row = {
        "attempt_id": attempt,
        "id": call.id,
        "parent": call.parent,
        "kept_ids": call.kept_ids,
        "kept_messages": call.kept_messages,
        "length": length,
        "turns": turns,
        "sampled": 0 if call.origin else len(call.completion_ids),
        "status": str(call.status),
        "origin": call.origin,
        "prompt_ids": pack_ids(call.prompt_ids),
        "completion_ids": pack_ids(call.completion_ids),
        "logprobs": None if call.logprobs is None else pack_floats(call.logprobs),
        "body": encode_json(_CallBody(**{name: getattr(call, name) for name in _BODY_FIELDS})),
    }
    own = {name: getattr(call, name) for name in _OWN_FIELDS}
    if sampled is None or replace(sampled, origin=call.origin, **own) != call:
        return row
    return row | dict.fromkeys(("prompt_ids", "completion_ids", "logprobs")) | {"body": encode_json(_CallBody(**own))}


def call_from_row(row: Any) -> Call:
    """Build a call from a row of `WHOLE_CALLS`."""
    body = _decode_body(row.body)
    if row.origin_body is not None:
        body = replace(_decode_body(row.origin_body), **{name: getattr(body, name) for name in _OWN_FIELDS})
    return Call(
        id=row.id,
        parent=row.parent,
        kept_ids=row.kept_ids,
        kept_messages=row.kept_messages,
        status=CallStatus(row.status),
        origin=row.origin,
        prompt_ids=unpack_ids(row.prompt_ids),
        completion_ids=unpack_ids(row.completion_ids),
        logprobs=None if row.logprobs is None else unpack_floats(row.logprobs),
        **{name: getattr(body, name) for name in _BODY_FIELDS},
    )


def span_to_row(attempt: str, span: Span) -> dict[str, Any]:
    """Convert a span."""
    return {"attempt_id": attempt, "id": span.span_id, "body": encode_json(span)}


def reward_to_row(attempt: str, reward: Reward) -> dict[str, Any]:
    """Convert a reward."""
    return {
        "attempt_id": attempt,
        "id": reward.id,
        "kind": str(reward.kind),
        "source": reward.source,
        "body": encode_json(reward),
    }


def credit_to_row(step: StepCredits, credit: CallCredit) -> dict[str, Any]:
    """Convert what a step computed for a call."""
    return {
        "attempt_id": credit.attempt,
        "call_id": credit.call,
        "policy": step.policy,
        "step": step.step,
        "value": credit.value,
        "advantage": credit.advantage,
        "weight": credit.weight,
        "tokens": credit.tokens,
        "excluded": credit.excluded.encode(),
    }


def credit_from_row(row: Any) -> CallCredit:
    """Build what a step computed for a call."""
    return CallCredit(
        row.attempt_id, row.call_id, row.value, row.advantage, row.weight, row.tokens, row.excluded.decode()
    )
