"""SQL statements of the writer: built with SQLAlchemy, compiled once per dialect, executed directly on the driver.

SQLAlchemy's own execution costs several times what SQLite needs for a statement, and all writes go through one thread.
Values are passed to the driver unconverted: text, numbers, bytes or None.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

from sqlalchemy import Table, bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.expression import ClauseElement

_DIALECTS: dict[str, Any] = {
    "sqlite": cast(Any, sqlite.dialect)(paramstyle="qmark"),
    "postgresql": cast(Any, postgresql.dialect)(paramstyle="pyformat"),
}
_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class ExecutionContext(Protocol):
    """A driver's cursor in a transaction, and the name of its SQL dialect."""

    dialect: str
    cursor: Any


class _Compiled:
    """A statement compiled for one dialect."""

    def __init__(self, clause: ClauseElement, dialect: str) -> None:
        compiled: Any = clause.compile(dialect=_DIALECTS[dialect])  # its type lacks `positiontup`
        self.sql = str(compiled)
        self._constants: dict[str, Any] = dict(compiled.params)
        self._order: tuple[str, ...] | None = compiled.positiontup and tuple(compiled.positiontup)
        self._row: Any = None

    def bind(self, values: Mapping[str, Any]) -> Any:
        """Arrange the values as the driver takes them."""
        merged = {**self._constants, **values}
        return merged if self._order is None else [merged[name] for name in self._order]

    def named(self, cursor: Any, rows: Iterable[Any]) -> list[Any]:
        """Convert rows to named tuples."""
        if self._row is None:
            self._row = _row_type([column[0] for column in cursor.description])
        return list(map(self._row._make, rows))


def _row_type(columns: list[str]) -> Any:
    return namedtuple("Row", columns)


class Statement:
    """One SQL statement, for all dialects or built per dialect; its parameters are `bindparam`s."""

    def __init__(self, clause: ClauseElement | Callable[[str], ClauseElement]) -> None:
        self._clause = clause
        self._compiled: dict[str, _Compiled] = {}

    def run(self, tx: ExecutionContext, **values: Any) -> int:
        """Execute; return the number of affected rows."""
        self._execute(tx, values)
        return int(tx.cursor.rowcount)

    def run_many(self, tx: ExecutionContext, rows: Iterable[Mapping[str, Any]]) -> int:
        """Execute for each of many sets of values; return the number of affected rows in all."""
        compiled = self._compiled_for(tx)
        bound = [compiled.bind(values) for values in rows]
        if not bound:
            return 0
        tx.cursor.executemany(compiled.sql, bound)
        return int(tx.cursor.rowcount)

    def all(self, tx: ExecutionContext, **values: Any) -> list[Any]:
        """Return all rows."""
        return self._execute(tx, values).named(tx.cursor, tx.cursor.fetchall())

    def first(self, tx: ExecutionContext, **values: Any) -> Any:
        """Return the first row, or None."""
        compiled, row = self._execute(tx, values), tx.cursor.fetchone()
        return None if row is None else compiled.named(tx.cursor, [row])[0]

    def scalar(self, tx: ExecutionContext, **values: Any) -> Any:
        """Return the first column of the first row, or None."""
        self._execute(tx, values)
        row = tx.cursor.fetchone()
        return None if row is None else row[0]

    def _execute(self, tx: ExecutionContext, values: Mapping[str, Any]) -> _Compiled:
        compiled = self._compiled_for(tx)
        tx.cursor.execute(compiled.sql, compiled.bind(values))
        return compiled

    def _compiled_for(self, tx: ExecutionContext) -> _Compiled:
        compiled = self._compiled.get(tx.dialect)
        if compiled is None:
            clause = self._clause(tx.dialect) if callable(self._clause) else self._clause
            compiled = self._compiled[tx.dialect] = _Compiled(clause, tx.dialect)
        return compiled


def insert(table: Table, *more: str) -> Statement:
    """Insert a row of the columns that a row must have, and of these."""
    return Statement(lambda dialect: _insert(dialect, table, more))


def insert_new(table: Table, *more: str) -> Statement:
    """Insert a row as `insert` does unless it exists; only new rows count as affected."""
    return Statement(lambda dialect: _insert(dialect, table, more).on_conflict_do_nothing())


def insert_or_update(table: Table, *more: str) -> Statement:
    """Insert a row as `insert` does, or overwrite the one with its primary key."""

    def clause(dialect: str) -> Any:
        statement = _insert(dialect, table, more)
        keys = {column.name for column in table.primary_key}
        others = {name: statement.excluded[name] for name in _columns(table, more) if name not in keys}
        return statement.on_conflict_do_update(index_elements=sorted(keys), set_=others)

    return Statement(clause)


def _insert(dialect: str, table: Table, more: tuple[str, ...]) -> Any:
    return _INSERTS[dialect](table).values({name: bindparam(name) for name in _columns(table, more)}).inline()


def _columns(table: Table, more: tuple[str, ...]) -> tuple[str, ...]:
    required = (column for column in table.columns if not column.nullable and column.server_default is None)
    return (*(column.name for column in required if column is not table.autoincrement_column), *more)
