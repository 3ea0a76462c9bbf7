"""Deletes what attempts printed and their spans, for the steps of a run that are never trained on again."""

from sqlalchemy import bindparam, delete, select, update

from leyden.store.schema import attempts, rollouts, spans
from leyden.store.write.statements import Statement
from leyden.store.write.writer import Transaction

_BATCH = 500
"""Rows of one transaction."""


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
