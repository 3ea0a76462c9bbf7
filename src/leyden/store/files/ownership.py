"""One process at a time owns a store: it holds a lock, and it notices when the store is no longer its own.

SQLite goes on writing to files that were deleted, moved or replaced, so that commits succeed and are lost. So the files
are compared with those that were opened after each commit, before anything is acknowledged.

The connection for writing to PostgreSQL holds an advisory lock as long as it lives. A transaction on it is under the
lock; with the connection the lock is lost too, and a new connection writes nothing before it has the lock again. If
another server had it meanwhile, what this one has in memory (active attempts, and so valid keys) is no longer true, and
it must end: each server leaves its own mark in the store.
"""

import fcntl
import os
import secrets
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert

from leyden.store.errors import StoreInUse, StoreLost
from leyden.store.schema import meta

_SUFFIXES = ("", ".lock"), ("-wal", "-shm")
"""Of the files that stay, and of those that SQLite creates and removes with the connections."""
_WHAT_HAPPENED = (
    "the store was deleted, moved or replaced while it was open. Nothing was acknowledged since; "
    "move it back or restore it before you start again"
)
_WAIT_S = 5
"""How long to wait for the lock: PostgreSQL needs a moment to notice that a server was killed."""
_LOCK = """
SELECT pg_advisory_lock((1279613252::bigint << 32) | oid::bigint) FROM pg_namespace WHERE nspname = current_schema()
"""
"""For each schema of a database, since each can be a store. The number is the application id of SQLite stores."""
_NOT_AVAILABLE = "55P03"
_SETTINGS = {
    # A server that the network cut off loses the lock after half a minute; by default that takes hours.
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "30s",
}
CONNECTION = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
"""The same from this side, as arguments of the driver."""


class StoreFiles:
    """Holds the lock of a SQLite store, and knows whether its files are still those that were opened."""

    def __init__(self, path: Path) -> None:
        """Lock the store; the operating system releases the lock when the process ends."""
        self._kept, self._of_connection = ([Path(f"{path}{suffix}") for suffix in some] for some in _SUFFIXES)
        self._opened: dict[Path, os.stat_result] = {}
        self._lock = os.open(self._kept[1], os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            address = path.with_name("url")  # which the server wrote
            at = f" at {address.read_text().strip()}" if address.is_file() else ""
            raise StoreInUse(f"is in use by another server{at}: stop that one, or name another with --home") from error

    def remember(self) -> None:
        """Take the files for those of the store: a connection has just opened them."""
        self._opened = {file: file.stat() for file in self._kept + self._of_connection}

    def check(self) -> None:
        """Raise `StoreLost` unless every file is the one that was opened."""
        for file, opened in self._opened.items():
            try:
                same = os.path.samestat(file.stat(), opened)
            except OSError as error:
                raise StoreLost(f"{file} is gone ({error.strerror}): {_WHAT_HAPPENED}") from error
            if not same:
                raise StoreLost(f"{file} is not the file that was opened: {_WHAT_HAPPENED}")

    def forget_connection(self) -> None:
        """Check, before a new connection, only the files that the last one has not removed."""
        for file in self._of_connection:
            self._opened.pop(file, None)
        self.check()

    def unlock(self) -> None:
        """Release the lock."""
        os.close(self._lock)


class ServerLock:
    """The lock of one server, on one connection after another."""

    def __init__(self, store: str) -> None:
        """`store` is its name in messages."""
        self._store, self._mark = store, secrets.token_hex(16)
        self._marked = False

    def acquire(self, connection: Any) -> None:
        """Lock the store with a new connection. Raises `StoreInUse` or `StoreLost`, and closes the connection."""
        try:
            self._lock(connection)
            connection.commit()
        except BaseException:
            connection.close()
            raise

    def leave_mark(self, connection: Connection) -> None:
        """Make this server the owner, in a transaction of the connection that has the lock."""
        connection.execute(delete(meta).where(meta.c.name == "owner"))
        connection.execute(insert(meta).values(name="owner", value=self._mark))
        self._marked = True

    def _lock(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            for name, value in _SETTINGS.items():
                cursor.execute(f"SET {name} = '{value}'")
            self._refuse_other_owner(cursor)
            cursor.execute(f"SET LOCAL lock_timeout = '{_WAIT_S}s'")
            try:
                cursor.execute(_LOCK)
            except Exception as error:
                if getattr(error, "sqlstate", None) != _NOT_AVAILABLE:
                    raise
                raise StoreInUse(
                    f"{self._store} is in use by another server: stop that one, or name another with --store"
                ) from error
            self._refuse_other_owner(cursor)  # it may have waited for that one to end

    def _refuse_other_owner(self, cursor: Any) -> None:
        if not self._marked:
            return
        cursor.execute("SELECT value FROM meta WHERE name = 'owner'")
        if cursor.fetchone() != (self._mark,):
            raise StoreLost(
                f"another server has used {self._store} while this one was disconnected from it, so what this one "
                "knows is no longer true: run one server for a database"
            )
