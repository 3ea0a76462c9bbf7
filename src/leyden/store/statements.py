"""SQL of the writing side: built with SQLAlchemy, compiled once a dialect, run straight on the driver.

SQLAlchemy's own execution costs several times what SQLite needs for the statement, and the writer is one thread that
everybody waits for. Values go to the driver as they are: text, numbers, bytes or None.
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


class InTransaction(Protocol):
    """A driver's cursor in a transaction, and the name of its dialect."""

    dialect: str
    cursor: Any


class _Compiled:
    """A statement in one dialect."""

    def __init__(self, clause: ClauseElement, dialect: str) -> None:
        compiled = clause.compile(dialect=_DIALECTS[dialect])
        self.sql = str(compiled)
        self._constants: dict[str, Any] = dict(compiled.params)
        self._order: tuple[str, ...] | None = compiled.positiontup and tuple(compiled.positiontup)  # type: ignore[attr-defined]
        self._row: Any = None

    def bind(self, values: Mapping[str, Any]) -> Any:
        """The values as the driver takes them."""
        merged = {**self._constants, **values}
        return merged if self._order is None else [merged[name] for name in self._order]

    def name(self, cursor: Any, rows: Iterable[Any]) -> list[Any]:
        """Rows whose columns have names."""
        if self._row is None:
            self._row = _row_type([column[0] for column in cursor.description])
        return list(map(self._row._make, rows))


def _row_type(columns: list[str]) -> Any:
    return namedtuple("Row", columns)


class Statement:
    """One SQL statement, given for each dialect or the same for all; its parameters are `bindparam`s."""

    def __init__(self, clause: ClauseElement | Callable[[str], ClauseElement]) -> None:
        self._clause = clause
        self._compiled: dict[str, _Compiled] = {}

    def run(self, tx: InTransaction, **values: Any) -> int:
        """Run it; how many rows it touched."""
        compiled = self._in(tx)
        tx.cursor.execute(compiled.sql, compiled.bind(values))
        return int(tx.cursor.rowcount)

    def run_many(self, tx: InTransaction, rows: Iterable[Mapping[str, Any]]) -> int:
        """Run it for each of many sets of values; how many rows it touched in all."""
        compiled = self._in(tx)
        bound = [compiled.bind(values) for values in rows]
        if not bound:
            return 0
        tx.cursor.executemany(compiled.sql, bound)
        return int(tx.cursor.rowcount)

    def all(self, tx: InTransaction, **values: Any) -> list[Any]:
        """The rows it gives."""
        compiled = self._in(tx)
        tx.cursor.execute(compiled.sql, compiled.bind(values))
        return compiled.name(tx.cursor, tx.cursor.fetchall())

    def first(self, tx: InTransaction, **values: Any) -> Any:
        """The first row it gives, or None."""
        compiled = self._in(tx)
        tx.cursor.execute(compiled.sql, compiled.bind(values))
        row = tx.cursor.fetchone()
        return None if row is None else compiled.name(tx.cursor, [row])[0]

    def scalar(self, tx: InTransaction, **values: Any) -> Any:
        """The first column of the first row it gives, or None."""
        compiled = self._in(tx)
        tx.cursor.execute(compiled.sql, compiled.bind(values))
        row = tx.cursor.fetchone()
        return None if row is None else row[0]

    def _in(self, tx: InTransaction) -> _Compiled:
        compiled = self._compiled.get(tx.dialect)
        if compiled is None:
            clause = self._clause(tx.dialect) if callable(self._clause) else self._clause
            compiled = self._compiled[tx.dialect] = _Compiled(clause, tx.dialect)
        return compiled


def insert(table: Table, *columns: str) -> Statement:
    """Insert a row of these columns."""
    return Statement(lambda dialect: _insert(dialect, table, columns))


def insert_new(table: Table, *columns: str) -> Statement:
    """Insert a row of these columns unless it exists already; the rows touched are those that are new."""
    return Statement(lambda dialect: _insert(dialect, table, columns).on_conflict_do_nothing())


def insert_or_update(table: Table, *columns: str) -> Statement:
    """Insert a row of these columns, or overwrite the one that has its key."""

    def clause(dialect: str) -> Any:
        statement = _insert(dialect, table, columns)
        keys = {column.name for column in table.primary_key}
        others = {name: statement.excluded[name] for name in columns if name not in keys}
        return statement.on_conflict_do_update(index_elements=sorted(keys), set_=others)

    return Statement(clause)


def _insert(dialect: str, table: Table, columns: tuple[str, ...]) -> Any:
    return _INSERTS[dialect](table).values({name: bindparam(name) for name in columns}).inline()
