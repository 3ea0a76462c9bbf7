"""Runs queries on SQLite files: reading only, within limits of time, rows and memory.

A query can do nothing but SELECT: the file is opened read-only, and an authorizer refuses everything else, such as
attaching or creating another file.
"""

import sqlite3
import time
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 5.0
ROW_LIMIT = 20_000
VALUE_BYTES = 1_000_000
OPCODES = 5_000
"""Virtual machine instructions between two looks at the clock."""
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


class QueryError(Exception):
    """The query failed or exceeded a limit; the message is fit for a model to read."""


class Rows(NamedTuple):
    """The result of a query."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def connect(database: str | Path) -> sqlite3.Connection:
    """Open a file for reading. Text that is no UTF-8 is read with replacement characters."""
    connection = sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro", uri=True)
    connection.text_factory = lambda data: data.decode(errors="replace")
    return connection


def execute(database: str | Path, query: str, limit_s: float = LIMIT_S, row_limit: int = ROW_LIMIT) -> Rows:
    """Run one SELECT. Everything that goes wrong is a `QueryError`."""
    deadline = time.monotonic() + limit_s
    connection = connect(database)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, OPCODES)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise QueryError("there is no SELECT in the answer")
        rows = cursor.fetchmany(row_limit + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        slow = time.monotonic() > deadline
        raise QueryError(f"the query took longer than {limit_s:g} s" if slow else str(error)) from error
    finally:
        connection.close()
    if len(rows) > row_limit:
        raise QueryError(f"the query returned more than {row_limit} rows")
    return Rows(tuple(column[0] for column in cursor.description), rows)
