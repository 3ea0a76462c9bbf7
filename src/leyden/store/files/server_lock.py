"""One server owns a PostgreSQL store: its connection for writing holds an advisory lock for as long as it lives.

A transaction on that connection is a transaction under the lock; with the connection the lock is lost too, and a new
connection writes nothing before it has the lock again. If another server had it meanwhile, what this one has in memory
(active leases, and so valid keys) is no longer true, and it must end: each server leaves its own mark in the store.
"""

import secrets
from typing import Any

from sqlalchemy import Connection, delete, insert

from leyden.store.errors import StoreInUse, StoreLost
from leyden.store.schema import meta

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
