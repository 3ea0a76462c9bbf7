"""Queries of the dashboard about rollouts: filtered and sorted lists, failures by message, the values to filter by."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, exists, func, select

from leyden.api.views import Facets, Failure, Failures, RolloutListing, RolloutQuery
from leyden.api.wire import ListedRollout
from leyden.outcomes import Ending, general_message
from leyden.store.codec import encode_json
from leyden.store.mapping import listed_rollout_from_row
from leyden.store.read.queries import distinct_values, require_run
from leyden.store.read.run_digest import RunDigest
from leyden.store.read.task_listing import beginning, read_beginnings
from leyden.store.schema import LAST_ATTEMPT, attempts, roles, rollouts, tasks

_FAILURES_EXAMINED = 20_000
_MAX_ROLES = 100


_STATE = func.coalesce(rollouts.c.ending, rollouts.c.state)

_SORTS: dict[str, tuple[ColumnElement[Any], ...]] = {
    "newest": (rollouts.c.seq.desc(),),
    "oldest": (rollouts.c.seq,),
    **{name: (rollouts.c[name].is_(None), rollouts.c[name], rollouts.c.seq) for name in ("reward", "tokens", "calls")},
    **{
        f"-{name}": (rollouts.c[name].is_(None), rollouts.c[name].desc(), rollouts.c.seq)
        for name in ("reward", "tokens", "calls")
    },
    "step": (rollouts.c.step.is_(None), rollouts.c.step, rollouts.c.seq),
    "-step": (rollouts.c.step.is_(None), rollouts.c.step.desc(), rollouts.c.seq.desc()),
    "outcome": (_STATE, rollouts.c.seq.desc()),
    "-outcome": (_STATE.desc(), rollouts.c.seq.desc()),
}


def search_rollouts(connection: Connection, run: str, query: RolloutQuery) -> RolloutListing:
    """Return one page of the rollouts that match a query, and how many match."""
    require_run(connection, run)
    conditions = _conditions(run, query)
    if query.text:
        conditions.append(_with_text(connection, run, query.text))
    if query.message:
        conditions.append(rollouts.c.seq.in_(_with_message(connection, run, conditions, query.message)))
    count = select(func.count()).select_from(rollouts).where(*conditions)
    # Pages are found in the index alone, and only their rows are read. A filter is applied once, to page and count.
    counted = func.count().over() if query.role or len(conditions) > 1 else count.scalar_subquery()
    page = select(rollouts.c.seq, counted).where(*conditions).order_by(*_SORTS[query.sort])
    found = connection.execute(page.limit(query.limit).offset(query.offset)).all()
    total = found[0][1] if found else connection.scalar(count) or 0
    seqs = [seq for seq, _ in found]
    rows = {row.seq: row for row in connection.execute(select(rollouts).where(rollouts.c.seq.in_(seqs)))}
    of_page = select(attempts.c.rollout_id, attempts.c.result).join(rollouts, LAST_ATTEMPT)
    answers = connection.execute(of_page.where(rollouts.c.seq.in_(seqs), attempts.c.result.is_not(None)))
    return RolloutListing(
        tuple(listed_rollout_from_row(rows[seq]) for seq in seqs),
        total,
        read_beginnings(connection, run, {row.task_id for row in rows.values()}),
        {id: beginning(result) for id, result in answers},
    )


def _with_text(connection: Connection, run: str, text: str) -> ColumnElement[bool]:
    """Select the rollouts whose task or last result has a text; both are stored as JSON."""
    written = encode_json(text)[1:-1].decode()

    def has_text(column: ColumnElement[Any]) -> ColumnElement[bool]:
        is_sqlite = connection.dialect.name == "sqlite"
        return (cast(column, Text) if is_sqlite else func.convert_from(column, "UTF8")).icontains(
            written, autoescape=True
        )

    of_run = select(tasks.c.id).where(tasks.c.run_id == run, has_text(tasks.c.input))
    answered = exists().where(LAST_ATTEMPT, has_text(attempts.c.result)).correlate(rollouts)
    return rollouts.c.task_id.in_(of_run) | answered


def _conditions(run: str, query: RolloutQuery) -> list[ColumnElement[bool]]:
    found = [_of_role(run, query.role) if query.role else rollouts.c.run_id == run]
    if query.purpose is not None:
        found.append(rollouts.c.purpose == str(query.purpose))
    if query.ending:
        found.append(_STATE.in_(query.ending.split(",")))
    if query.task:
        found.append(rollouts.c.task_id == query.task)
    if query.reward_below is not None:
        found.append(rollouts.c.reward < query.reward_below)
    for column, low, high in (
        (rollouts.c.step, query.step_from, query.step_to),
        (rollouts.c.reward, query.reward_from, query.reward_to),
        (rollouts.c.tokens, query.tokens_from, query.tokens_to),
    ):
        if low is not None:
            found.append(column >= low)
        if high is not None:
            found.append(column <= high)
    return found


def _of_role(run: str, role: str) -> ColumnElement[bool]:
    """Select the rollouts of a run in which a role took part, by their ids.

    The run is not a condition on the rollouts too: SQLite would search all of the run for those with the role.
    """
    same = roles.c.run_id == run, roles.c.role == role.encode(errors="replace")
    return rollouts.c.id.in_(select(roles.c.rollout_id).where(*same))


def _with_message(
    connection: Connection, run: str, conditions: Sequence[ColumnElement[bool]], message: str
) -> list[int]:
    query = select(rollouts.c.seq, rollouts.c.message).where(*conditions, _FAILED).order_by(rollouts.c.seq.desc())
    rows = connection.execute(query.limit(_FAILURES_EXAMINED))
    return [row.seq for row in rows if _general(row.message) == message]


_FAILED = rollouts.c.ending.is_not(None) & (rollouts.c.ending != str(Ending.SUCCEEDED))


def failures(connection: Connection, run: str) -> Failures:
    """Group failed rollouts by ending and message; reads the newest ones only."""
    require_run(connection, run)
    conditions = [rollouts.c.run_id == run, _FAILED]
    query = select(rollouts.c.id, rollouts.c.ending, rollouts.c.message).where(*conditions)
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for row in connection.execute(query.order_by(rollouts.c.seq.desc()).limit(_FAILURES_EXAMINED)):
        key = row.ending, _general(row.message)
        counts[key] += 1
        examples.setdefault(key, row.id)
    total = connection.scalar(select(func.count()).select_from(rollouts).where(*conditions)) or 0
    groups = (Failure(*key, count, examples[key]) for key, count in counts.most_common(200))
    return Failures(tuple(groups), counts.total(), total)


def _general(message: bytes | None) -> str:
    return general_message((message or b"").decode(errors="replace"))


def facets(connection: Connection, run: str, digest: RunDigest) -> Facets:
    """Return the values by which a run's rollouts can be filtered."""
    require_run(connection, run)
    found = distinct_values(connection, roles.c.role, roles.c.run_id == run, limit=_MAX_ROLES)
    names = sorted(bytes(name).decode(errors="replace") for name in found)
    return Facets(digest.states, digest.purposes, tuple(names), digest.last_step)


def group_rollouts(connection: Connection, run: str, group: str) -> list[ListedRollout]:
    """Return the rollouts of a group in order."""
    query = select(rollouts).where(rollouts.c.group_id == group, rollouts.c.run_id == run).order_by(rollouts.c.place)
    return [listed_rollout_from_row(row) for row in connection.execute(query)]
