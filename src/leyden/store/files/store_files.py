"""The files of a SQLite store that a process writes to: one process at a time, and only while they are in their place.

SQLite goes on writing to files that were deleted, moved or replaced, so that commits succeed and are lost. So the files
are compared with those that were opened after each commit, before anything is acknowledged.
"""

import fcntl
import os
from pathlib import Path

from leyden.store.errors import StoreInUse, StoreLost

_SUFFIXES = ("", ".lock"), ("-wal", "-shm")
"""Of the files that stay, and of those that SQLite creates and removes with the connections."""


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
            raise StoreInUse("is in use by another server: stop that one, or name another with --home") from error

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


_WHAT_HAPPENED = (
    "the store was deleted, moved or replaced while it was open. Nothing was acknowledged since; "
    "move it back or restore it before you start again"
)
