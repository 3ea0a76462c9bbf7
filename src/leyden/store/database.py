"""Opens a database. Differences between SQLite and PostgreSQL are here and in statements.py.

One process at a time writes to a store; another that tries is refused. A store that cannot be used (corrupt,
another program's, of another schema) is refused before anything is written to it.
"""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError
from sqlalchemy.pool import QueuePool

from leyden.extras import install_command
from leyden.store.errors import StoreLost, StoreUnusable
from leyden.store.files.ownership import CONNECTION, ServerLock, StoreFiles
from leyden.store.schema import create_tables, has_tables
from leyden.urls import password_keys

_APPLICATION = 0x4C455944  # "LEYD", in the header of every SQLite store
_CHECK_UP_TO = 256 * 2**20  # larger files are checked as they are read: a start takes seconds, not minutes
_READERS = 4
_CONNECTION_WORDS = re.compile(r"\s*(host|hostaddr|port|dbname|user|password|service)\s*=")
"""How PostgreSQL's own tools name a database, too."""
_CHECKPOINT_WAIT_MS = 100
"""How long a checkpoint that frees space waits for readers, while writers wait for it; a later one frees the rest."""


class Database:
    """A writing engine with one connection, which no other process has at the same time, and a reading engine."""

    def __init__(self, location: str | Path, *, readonly: bool = False, create: bool = True) -> None:
        """Without `create`, a SQLite file that does not exist is a store that was lost, and not a new one."""
        self.url = _url(location)
        self.readonly, self._create = readonly, create
        self._files: StoreFiles | None = None
        """Of a SQLite store that is open for writing."""
        try:
            if self.dialect == "sqlite":
                self._open_sqlite(Path(self.url.database or ""))
            else:
                self._open_postgresql()
        except BaseException as error:
            self.close()
            if isinstance(error, StoreUnusable):
                name = "" if str(error).startswith(self.name) else f"{self.name} "  # that of a lock has it
                raise type(error)(f"{name}{error}") from error.__cause__
            if isinstance(error, DatabaseError):
                raise StoreUnusable(f"{self.name} cannot be written: {_first_line(error.orig)}") from error
            raise

    @property
    def name(self) -> str:
        """The path or URL to show to a user, without the password."""
        if self.dialect == "sqlite":
            return self.url.database or ""
        shown = self.url.set(drivername="postgresql").difference_update_query(password_keys(self.url.query))
        return shown.render_as_string(hide_password=True)

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self.url.get_backend_name()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Yield a driver's cursor in a transaction that excludes all other writers, in this and other processes.

        Raises `StoreLost` if the transaction was committed to files that nobody will find.
        """
        connection = self.writer.raw_connection()
        try:
            cursor = connection.cursor()
            if self.dialect == "sqlite":
                cursor.execute("BEGIN IMMEDIATE")
            yield cursor
            connection.commit()
            if self._files is not None:
                self._files.check()
        except BaseException:
            connection.rollback()
            raise
        finally:
            connection.close()

    def close(self) -> None:
        """Close every connection and release the lock."""
        self._dispose()
        if self._files is not None:
            self._files.unlock()
            self._files = None

    def _dispose(self) -> None:
        for engine in (getattr(self, "reader", None), getattr(self, "writer", None)):
            if engine is not None:
                engine.dispose()

    def size(self) -> int:
        """Return the size in bytes on disk."""
        if self.dialect == "sqlite":
            files = (Path(f"{self.url.database}{suffix}") for suffix in ("", "-wal"))
            return sum(file.stat().st_size for file in files if file.exists())
        with self.reader.connect() as connection:
            return int(connection.scalar(text("SELECT pg_database_size(current_database())")) or 0)

    def shrink(self) -> bool:
        """Return some of the space of deleted rows to the file system; False when none is left."""
        if self.dialect != "sqlite":  # on a connection of the readers: it may take minutes, and the writer has only one
            with self.reader.connect().execution_options(isolation_level="AUTOCOMMIT") as reading:
                reading.exec_driver_sql("VACUUM")
            return False
        connection = self.writer.raw_connection()  # outside a transaction, and between those of the writer
        try:
            cursor: Any = connection.cursor()
            cursor.execute("PRAGMA incremental_vacuum(2000)")
            cursor.fetchall()  # each step frees a page
            cursor.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_WAIT_MS}")
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            cursor.fetchall()
            cursor.execute("PRAGMA freelist_count")
            return bool(cursor.fetchone()[0])
        finally:
            connection.detach()
            connection.close()

    def _open_sqlite(self, path: Path) -> None:
        exists = path.exists()
        if self.readonly and not exists:
            raise StoreUnusable("does not exist: name another database")
        if not self._create and not exists:
            raise StoreLost(f"{path} is gone: the store was deleted or moved. Move it back or restore it")
        if exists and path.stat().st_size == 0:
            raise StoreUnusable("has 0 bytes, so what it held is lost: restore it, or delete it to start an empty one")
        if not self.readonly:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files = StoreFiles(path)
            os.close(os.open(path, os.O_CREAT, 0o600))  # the record is private to its owner
        try:
            self._connect_sqlite(path, exists)
        except BaseException:
            if not exists:  # half a store would be refused by the next start
                self._dispose()
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
            raise

    def _connect_sqlite(self, path: Path, exists: bool) -> None:
        if exists:
            _inspect(path)
        self.reader = create_engine(self.url, poolclass=QueuePool, pool_size=_READERS, max_overflow=0)
        self.writer = create_engine(self.url, poolclass=QueuePool, pool_size=1, max_overflow=0)

        @event.listens_for(self.reader, "connect")
        def read(connection: sqlite3.Connection, _: object) -> None:
            connection.isolation_level = None
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA busy_timeout = 30000")

        @event.listens_for(self.writer, "connect")
        def write(connection: sqlite3.Connection, _: object) -> None:
            if self._files is not None:
                self._files.forget_connection()
            connection.isolation_level = None
            connection.execute("PRAGMA busy_timeout = 30000")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk before it is acknowledged
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            connection.execute("PRAGMA user_version").fetchone()  # opens every file
            if self._files is not None:
                self._files.remember()

        @event.listens_for(self.reader, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        @event.listens_for(self.writer, "begin")
        def begin_exclusive(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        if not self.readonly:
            with self.writer.begin() as connection:
                connection.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION}")
                if not has_tables(connection):
                    create_tables(connection)

    def _open_postgresql(self) -> None:
        try:
            # The queries of one transaction read one state of the database, as they do in SQLite.
            self.reader = create_engine(
                self.url, pool_size=_READERS, pool_pre_ping=True, isolation_level="REPEATABLE READ"
            )
            self.writer = create_engine(
                self.url, pool_size=1, max_overflow=0, pool_pre_ping=True, connect_args=CONNECTION
            )
        except ModuleNotFoundError as missing:
            raise StoreUnusable(f"needs a driver: {install_command('postgres')}") from missing
        lock = ServerLock(self.name)
        event.listen(self.writer, "connect", lambda connection, _: lock.acquire(connection))
        try:
            with self.reader.begin() as connection:
                if not has_tables(connection) and self.readonly:
                    raise StoreUnusable("is empty: name another database")
            if not self.readonly:
                with self.writer.begin() as connection:
                    if not has_tables(connection):
                        create_tables(connection)
                    lock.leave_mark(connection)
        except DatabaseError as error:
            raise StoreUnusable(f"cannot be opened: {_first_line(error.orig)}") from error


def _url(location: str | Path) -> URL:
    if isinstance(location, str) and _CONNECTION_WORDS.match(location):  # which may have a password
        raise StoreUnusable("the store has words such as host=...: write postgresql://USER:PASSWORD@HOST/DATABASE")
    if isinstance(location, Path) or "://" not in location:
        return URL.create("sqlite", database=str(location))
    try:
        url = make_url(location)
    except (ArgumentError, ValueError) as error:  # its text may have a password in it
        raise StoreUnusable("the store is not a database URL: write a path, or postgresql://...") from error
    match url.drivername:
        case "sqlite":
            return url
        case "postgresql" | "postgres" | "postgresql+psycopg":
            return url.set(drivername="postgresql+psycopg")
        case other:
            raise StoreUnusable(f"{other} databases are not supported: write a path, or postgresql://...")


def _inspect(path: Path) -> None:
    """Check through a read-only connection that a file is a sound store of this schema."""
    readonly = path.absolute().as_uri() + "?mode=ro"
    engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(readonly, uri=True))
    try:
        with engine.connect() as connection:
            if connection.exec_driver_sql("PRAGMA application_id").scalar() != _APPLICATION:
                raise StoreUnusable("is not a Leyden store: name another file")
            if path.stat().st_size <= _CHECK_UP_TO:
                verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
                if verdict != "ok":
                    raise StoreUnusable(f"is corrupt and was left untouched: {_first_line(verdict)}")
            has_tables(connection)
    except DatabaseError as error:
        raise StoreUnusable(f"is corrupt and was left untouched: {_first_line(error.orig)}") from error
    finally:
        engine.dispose()


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
