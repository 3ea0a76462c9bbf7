"""The tables. Text columns hold identifiers only; user content is JSON in binary columns, because not every database
stores every string as text.
"""

import math

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    and_,
    func,
    inspect,
    literal_column,
    select,
    text,
)

from leyden.store.errors import StoreUnusable

SCHEMA = 12
"""The version of the tables. Every change of them increases it: a store of another version is refused."""

metadata = MetaData()

Serial = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows itself only in an INTEGER key


def _owned_by(column: str) -> ForeignKey:
    """Return a foreign key that deletes a row with its owner."""
    return ForeignKey(column, ondelete="CASCADE")


runs = Table(
    "runs",
    metadata,
    Column("id", String, primary_key=True),
    Column("state", String, nullable=False),  # open, or deleting
    Column("settings", LargeBinary, nullable=False),
    Column("config", LargeBinary, nullable=False),
    Column("created", Double, nullable=False),
)

tasks = Table(
    "tasks",
    metadata,
    Column("run_id", _owned_by("runs.id"), primary_key=True),
    Column("id", String, primary_key=True),
    Column("input", LargeBinary, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("id", String, primary_key=True),
    Column("run_id", _owned_by("runs.id"), nullable=False, index=True),
    Column("task_id", String, nullable=False),
    Column("purpose", String, nullable=False),
    Column("size", Integer, nullable=False),
    Column("done", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("origin", LargeBinary),
    Column("created", Double, nullable=False),
    Column("finished", Double),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("run_id", _owned_by("runs.id"), nullable=False),
    Column("group_id", _owned_by("groups.id"), nullable=False, index=True),
    Column("task_id", String, nullable=False),
    Column("place", Integer, nullable=False),  # its index in the group
    Column("purpose", String, nullable=False),
    Column("step", Integer),  # of the training that requested it
    Column("state", String, nullable=False),
    Column("position", Double, nullable=False),  # in the queue, or PARKED: see queue.py
    Column("attempts", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("not_before", Double, nullable=False, server_default=text("0")),  # when it may be tried again
    Column("alone", Integer, nullable=False, server_default=text("0")),  # its next attempt runs alone in a process
    Column("origin", LargeBinary),
    Column("created", Double, nullable=False),
    Column("finished", Double),
    Column("ending", String),
    Column("message", LargeBinary),
    # For lists, written when the rollout finishes: its reward by the outcome table, and totals of its last attempt.
    Column("reward", Double),
    Column("calls", Integer),
    Column("tokens", BigInteger),
)
QUEUED = rollouts.c.state == literal_column("'queued'")  # with a parameter, SQLite would not use the indexes below
PARKED = math.inf
LEASABLE = and_(QUEUED, rollouts.c.position < PARKED)  # now or, if it is a retry, later
QUEUE_ORDER = (rollouts.c.position, rollouts.c.seq, rollouts.c.not_before)  # the last: to skip delayed retries quickly
Index("queue", *QUEUE_ORDER, sqlite_where=QUEUED, postgresql_where=QUEUED)
Index("queue_of_run", rollouts.c.run_id, *QUEUE_ORDER, sqlite_where=QUEUED, postgresql_where=QUEUED)
Index("rollouts_of_run", rollouts.c.run_id, rollouts.c.seq)
# Has every column by which lists are filtered and sorted, so that neither reads the rows of the table.
Index(
    "rollouts_listed",
    *(
        rollouts.c[name]
        for name in ("run_id", "purpose", "step", "state", "ending", "reward", "calls", "tokens", "seq")
    ),
)

roles = Table(  # the parts of the agent that took part in a rollout, by which lists are filtered
    "roles",
    metadata,
    Column("run_id", _owned_by("runs.id"), primary_key=True),
    Column("role", LargeBinary, primary_key=True),
    Column("rollout_id", _owned_by("rollouts.id"), primary_key=True, index=True),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", String, primary_key=True),
    Column("run_id", _owned_by("runs.id"), nullable=False),
    Column("rollout_id", _owned_by("rollouts.id"), nullable=False, index=True),
    Column("number", Integer, nullable=False),
    Column("worker", String, nullable=False),
    Column("pool", String),
    Column("lease_s", Double, nullable=False),
    Column("started", Double, nullable=False),
    Column("expires", Double, nullable=False),
    Column("ended", Double),
    Column("ending", String),
    Column("message", LargeBinary),
    Column("result", LargeBinary),
    Column("output", LargeBinary),
    Column("origin", LargeBinary),
    Column("diverged", LargeBinary),
    Column("blameless", Integer, nullable=False, server_default=text("0")),  # its rollout did not cause its end
    # Totals for `leyden runs`, written once when the attempt ends.
    Column("calls", Integer, nullable=False, default=0),
    Column("tokens", BigInteger, nullable=False, default=0),
    Column("reward", Double),
    Index("attempts_of_run", "run_id", "calls", "tokens"),  # has the columns that are summed
    Index("attempts_ended", "ended"),
)
ACTIVE = attempts.c.ended.is_(None)
LAST_ATTEMPT = and_(attempts.c.rollout_id == rollouts.c.id, attempts.c.number == rollouts.c.attempts)
Index("alive", attempts.c.expires, sqlite_where=ACTIVE, postgresql_where=ACTIVE)

scorings = Table(  # one row per group that waits to be scored: see scoring.py
    "scorings",
    metadata,
    Column("group_id", _owned_by("groups.id"), primary_key=True),
    Column("run_id", _owned_by("runs.id"), nullable=False, index=True),
    Column("ready", Double),  # since when all its rollouts have ended
    Column("number", Integer, nullable=False),  # of the current or latest lease
    Column("lost", Integer, nullable=False),  # expired leases
    Column("worker", String),
    Column("lease_s", Double),
    Column("expires", Double),  # of the current lease
)

calls = Table(
    "calls",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("attempt_id", _owned_by("attempts.id"), nullable=False),
    Column("id", String, nullable=False),
    Column("parent", String),
    Column("kept_ids", Integer, nullable=False),
    Column("kept_messages", Integer, nullable=False),
    Column("length", Integer, nullable=False),  # tokens of the whole prompt and the completion
    Column("turns", Integer, nullable=False),  # messages of the whole prompt and the response
    Column("sampled", Integer, nullable=False),  # tokens of the completion; 0 if it was replayed
    Column("status", String, nullable=False),
    Column("origin", String),  # the attempt that sampled it, if it was replayed
    Column("prompt_ids", LargeBinary),  # if NULL, they and all below are those of the origin's call with this id
    Column("completion_ids", LargeBinary),
    Column("logprobs", LargeBinary),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("attempt_id", "id"),
)
_origin = calls.alias()
WHOLE_CALLS = select(
    *(column for column in calls.c if column.name not in ("prompt_ids", "completion_ids", "logprobs")),
    *(
        func.coalesce(calls.c[name], _origin.c[name]).label(name)
        for name in ("prompt_ids", "completion_ids", "logprobs")
    ),
    _origin.c.body.label("origin_body"),
).outerjoin(
    _origin,
    calls.c.prompt_ids.is_(None) & (_origin.c.attempt_id == calls.c.origin) & (_origin.c.id == calls.c.id),
)
"""Calls, those that were replayed with what the origin's call has in common with them."""

spans = Table(
    "spans",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("attempt_id", _owned_by("attempts.id"), nullable=False),
    Column("id", String, nullable=False),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("attempt_id", "id"),
)

rewards = Table(
    "rewards",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("attempt_id", _owned_by("attempts.id"), nullable=False),
    Column("id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("source", String, nullable=False),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("attempt_id", "id"),
)

credits = Table(  # one row per call and policy; a step that is repeated after a crash overwrites its rows
    "credits",
    metadata,
    Column("attempt_id", _owned_by("attempts.id"), primary_key=True),
    Column("call_id", String, primary_key=True),
    Column("policy", String, primary_key=True),
    Column("step", Integer, nullable=False),
    Column("value", Double),
    Column("advantage", Double),
    Column("weight", Double),
    Column("tokens", Integer, nullable=False),
    Column("excluded", LargeBinary, nullable=False),  # why; empty if the call was trained on
    sqlite_with_rowid=False,
)

deleted_responses = Table(  # calls whose response an agent deleted; the record keeps the calls
    "deleted_responses",
    metadata,
    Column("attempt_id", _owned_by("attempts.id"), primary_key=True),
    Column("call_id", String, primary_key=True),
    sqlite_with_rowid=False,
)

versions = Table(
    "versions",
    metadata,
    Column("run_id", _owned_by("runs.id"), primary_key=True),
    Column("policy", String, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("at", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String, primary_key=True),
    Column("seen", Double, nullable=False),
)

metrics = Table(
    "metrics",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("run_id", _owned_by("runs.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("name", String, nullable=False),
    Column("value", Double, nullable=False),
    Column("at", Double, nullable=False),
    Column("policy", String, nullable=False),
    Index("metrics_of_run", "run_id", "seq"),
    Index("metrics_by_name", "run_id", "policy", "name", "step", "value"),
)

events = Table(
    "events",
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=False),
    Column("run_id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("subject", String, nullable=False),
    Column("at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("events_of_run", "run_id", "seq"),
)

meta = Table(
    "meta",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", String, nullable=False),
)


def has_tables(connection: Connection) -> bool:
    """Whether a database has the tables of a store. Raises `StoreUnusable` if it has others."""
    tables = inspect(connection).get_table_names()
    if tables and meta.name not in tables:
        raise StoreUnusable("holds tables of another program: name a database that is for Leyden only")
    found = connection.scalar(select(meta.c.value).where(meta.c.name == "schema")) if tables else None
    if tables and found != str(SCHEMA):
        raise StoreUnusable(
            f"was written by another version of Leyden (schema {str(found)[:40]}, and this one reads {SCHEMA}): "
            "open it with that version, or name another store"
        )
    return bool(tables)


def create_tables(connection: Connection) -> None:
    """Create the tables in an empty database."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(meta.insert().values(name="schema", value=str(SCHEMA)))
