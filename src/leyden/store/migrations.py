"""The schema's version, and how an older store becomes a newer one: forwards only, each step in the transaction that
also records it.
"""

from collections.abc import Callable

from sqlalchemy import Connection, inspect, select, text, update

from leyden.store.errors import StoreUnusable
from leyden.store.schema import meta, metadata, rollouts

SCHEMA = 4


def _keep_output(connection: Connection) -> None:
    """What an attempt printed is kept with it."""
    kind = "BLOB" if connection.dialect.name == "sqlite" else "BYTEA"
    connection.execute(text(f"ALTER TABLE attempts ADD COLUMN output {kind}"))


def _score_groups(connection: Connection) -> None:
    """Groups may wait to be scored together."""
    connection.execute(
        text(
            "CREATE TABLE scorings (group_id VARCHAR PRIMARY KEY REFERENCES groups (id) ON DELETE CASCADE, "
            "run_id VARCHAR NOT NULL REFERENCES runs (id) ON DELETE CASCADE, ready DOUBLE PRECISION, "
            "number INTEGER NOT NULL, lost INTEGER NOT NULL, worker VARCHAR, lease_s DOUBLE PRECISION, "
            "expires DOUBLE PRECISION)"
        )
    )
    connection.execute(text("CREATE INDEX ix_scorings_run_id ON scorings (run_id)"))


def _wait_before_retries(connection: Connection) -> None:
    """A rollout may have to wait before it is tried again, and may have to be tried alone."""
    for column in ("not_before DOUBLE PRECISION", "alone INTEGER"):
        connection.execute(text(f"ALTER TABLE rollouts ADD COLUMN {column} NOT NULL DEFAULT 0"))
    for index in rollouts.indexes:
        if index.name in ("queue", "queue_of_run"):
            index.drop(connection)
            index.create(connection)


STEPS: dict[int, Callable[[Connection], None]] = {2: _keep_output, 3: _score_groups, 4: _wait_before_retries}
"""By the version that the step leads to; a step changes a store of the version before it."""


def version_of(connection: Connection) -> int | None:
    """The schema version of a store; None where the database is empty."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    if meta.name not in tables:
        raise StoreUnusable("holds tables of another program: name a database of Leyden's own")
    found = connection.scalar(select(meta.c.value).where(meta.c.name == "schema"))
    return int(found) if found is not None else None


def check(version: int | None) -> None:
    """Refuse a store that a newer Leyden wrote."""
    if version is not None and version > SCHEMA:
        raise StoreUnusable(
            f"was written by a newer Leyden (schema {version}; this one knows {SCHEMA}): upgrade Leyden to open it"
        )


def migrate(connection: Connection) -> None:
    """Create the tables in an empty database, or bring an older store forward."""
    version = version_of(connection)
    check(version)
    if version is None:
        metadata.create_all(connection)
        connection.execute(meta.insert().values(name="schema", value=str(SCHEMA)))
        return
    for step in range(version + 1, SCHEMA + 1):
        STEPS[step](connection)
        connection.execute(update(meta).where(meta.c.name == "schema").values(value=str(step)))
