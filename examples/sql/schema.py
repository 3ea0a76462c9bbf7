"""Describes a database to a model: every CREATE TABLE statement, and the first rows of each table."""

import re
from functools import lru_cache

from execution import connect

SAMPLE_ROWS = 2
CELL_CHARACTERS = 40


@lru_cache(maxsize=1024)
def describe(database: str, sample_rows: int = SAMPLE_ROWS) -> str:
    """Return the schema with sample rows, as SQL with comments."""
    connection = connect(database)
    try:
        tables = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
        ).fetchall()
        parts = []
        for name, statement in tables:
            quoted = name.replace('"', '""')
            rows = connection.execute(f'SELECT * FROM "{quoted}" LIMIT {sample_rows}').fetchall()
            written = re.sub(r"\s+", " ", statement).strip()
            samples = [f"-- {', '.join(map(show_value, row))}" for row in rows]
            parts.append("\n".join([f"{written};", *samples]))
        return "\n".join(parts)
    finally:
        connection.close()


def show_value(value: object) -> str:
    """Return the text of one cell, shortened where it is long."""
    text = "NULL" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= CELL_CHARACTERS else f"{text[:CELL_CHARACTERS]}..."
