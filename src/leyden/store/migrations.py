"""The schema version and the migrations of older stores: forwards only, each in the transaction that records it."""

import json
import re
from collections.abc import Callable

from sqlalchemy import Connection, inspect, select, text, update

from leyden.records import DEFAULT_POLICY
from leyden.store.errors import StoreUnusable
from leyden.store.schema import attempts, meta, metadata, roles, rollouts

SCHEMA = 9


def _add_output(connection: Connection) -> None:
    """Add the output of attempts."""
    kind = "BLOB" if connection.dialect.name == "sqlite" else "BYTEA"
    connection.execute(text(f"ALTER TABLE attempts ADD COLUMN output {kind}"))


def _add_scorings(connection: Connection) -> None:
    """Add the scoring of groups."""
    connection.execute(
        text(
            "CREATE TABLE scorings (group_id VARCHAR PRIMARY KEY REFERENCES groups (id) ON DELETE CASCADE, "
            "run_id VARCHAR NOT NULL REFERENCES runs (id) ON DELETE CASCADE, ready DOUBLE PRECISION, "
            "number INTEGER NOT NULL, lost INTEGER NOT NULL, worker VARCHAR, lease_s DOUBLE PRECISION, "
            "expires DOUBLE PRECISION)"
        )
    )
    connection.execute(text("CREATE INDEX ix_scorings_run_id ON scorings (run_id)"))


def _add_retry_backoff(connection: Connection) -> None:
    """Add back-off before retries, and retries alone in a process."""
    for column in ("not_before DOUBLE PRECISION", "alone INTEGER"):
        connection.execute(text(f"ALTER TABLE rollouts ADD COLUMN {column} NOT NULL DEFAULT 0"))
    for index in rollouts.indexes:
        if index.name in ("queue", "queue_of_run"):
            index.drop(connection)
            index.create(connection)


def _add_credits(connection: Connection) -> None:
    """Add what training computed for each call."""
    sqlite = connection.dialect.name == "sqlite"
    connection.execute(
        text(
            "CREATE TABLE credits (attempt_id VARCHAR NOT NULL REFERENCES attempts (id) ON DELETE CASCADE, "
            "call_id VARCHAR NOT NULL, policy VARCHAR NOT NULL, step INTEGER NOT NULL, value DOUBLE PRECISION, "
            "advantage DOUBLE PRECISION, weight DOUBLE PRECISION, tokens INTEGER NOT NULL, "
            f"excluded {'BLOB' if sqlite else 'BYTEA'} NOT NULL, PRIMARY KEY (attempt_id, call_id, policy))"
            + (" WITHOUT ROWID" if sqlite else "")
        )
    )


def _add_listing(connection: Connection) -> None:
    """Add what lists and plots of a run are filtered and sorted by, and fill it from what was recorded."""
    for column in ("step INTEGER", "reward DOUBLE PRECISION", "calls INTEGER", "tokens BIGINT"):
        connection.execute(text(f"ALTER TABLE rollouts ADD COLUMN {column}"))
    last = "FROM attempts a WHERE a.rollout_id = rollouts.id AND a.number = rollouts.attempts"
    connection.execute(
        text(
            f"UPDATE rollouts SET calls = (SELECT a.calls {last}), tokens = (SELECT a.tokens {last}), "
            f"reward = CASE WHEN ending = 'succeeded' THEN (SELECT a.reward {last}) END WHERE state = 'finished'"
        )
    )
    failures = text("UPDATE rollouts SET reward = :reward WHERE run_id = :run AND ending IN ('agent_error', 'timeout')")
    for run, settings in connection.execute(text("SELECT id, settings FROM runs")).all():
        connection.execute(failures, {"run": run, "reward": json.loads(settings).get("failure_reward", 0.0)})
    steps = text("UPDATE rollouts SET step = :step WHERE group_id = :group")
    for (group,) in connection.execute(text("SELECT id FROM groups")).all():
        if found := re.match(r"(?:step|eval)-(\d+)-", group):
            connection.execute(steps, {"group": group, "step": int(found.group(1))})
    roles.create(connection)
    connection.execute(text("DROP INDEX ix_attempts_run_id"))
    for index in (*attempts.indexes, *rollouts.indexes):
        if index.name in ("attempts_of_run", "rollouts_listed"):
            index.create(connection)
    newest = "SELECT MAX(seq) FROM metrics GROUP BY run_id, name, step"
    connection.execute(text(f"DELETE FROM metrics WHERE seq NOT IN ({newest})"))


def _add_deleted_responses(connection: Connection) -> None:
    """Add the responses that agents deleted."""
    connection.execute(
        text(
            "CREATE TABLE deleted_responses (attempt_id VARCHAR NOT NULL REFERENCES attempts (id) ON DELETE CASCADE, "
            "call_id VARCHAR NOT NULL, PRIMARY KEY (attempt_id, call_id))"
            + (" WITHOUT ROWID" if connection.dialect.name == "sqlite" else "")
        )
    )


def _add_recent(connection: Connection) -> None:
    """Add the index by which recent attempts are found."""
    connection.execute(text("CREATE INDEX attempts_ended ON attempts (ended)"))


def _add_policy_of_metrics(connection: Connection) -> None:
    """Add the policy of metrics; those that were recorded are the default policy's."""
    connection.execute(text(f"ALTER TABLE metrics ADD COLUMN policy VARCHAR NOT NULL DEFAULT '{DEFAULT_POLICY}'"))
    connection.execute(text("DROP INDEX IF EXISTS metrics_by_name"))
    connection.execute(text("CREATE INDEX metrics_by_name ON metrics (run_id, policy, name, step, value)"))


STEPS: dict[int, Callable[[Connection], None]] = {
    2: _add_output,
    3: _add_scorings,
    4: _add_retry_backoff,
    5: _add_credits,
    6: _add_listing,
    7: _add_deleted_responses,
    8: _add_recent,
    9: _add_policy_of_metrics,
}
"""Migrations by the version that they lead to, from the version before it."""


def version_of(connection: Connection) -> int | None:
    """Return the schema version of a store; None if the database is empty."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    if meta.name not in tables:
        raise StoreUnusable("holds tables of another program: name a database that is for Leyden only")
    found = connection.scalar(select(meta.c.value).where(meta.c.name == "schema"))
    if found is not None and not found.isdecimal():
        raise StoreUnusable(f"is corrupt and was left untouched: its schema version is {found[:40]!r}")
    return int(found) if found is not None else None


def check(version: int | None) -> None:
    """Raise `StoreUnusable` for a store that a newer Leyden wrote."""
    if version is not None and version > SCHEMA:
        raise StoreUnusable(
            f"was written by a newer Leyden (schema {version}; this one knows {SCHEMA}): upgrade Leyden to open it"
        )


def migrate(connection: Connection) -> None:
    """Create the tables in an empty database, or migrate an older store."""
    version = version_of(connection)
    check(version)
    if version is None:
        metadata.create_all(connection)
        connection.execute(meta.insert().values(name="schema", value=str(SCHEMA)))
        return
    for step in range(version + 1, SCHEMA + 1):
        STEPS[step](connection)
        connection.execute(update(meta).where(meta.c.name == "schema").values(value=str(step)))
