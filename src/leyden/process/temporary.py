"""Temporary folders that only this user can enter.

Those of a process that was killed are deleted by the next one that makes a folder.
"""

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

_PREFIX = "leyden."


class TemporaryFolder:
    """A new folder, which is locked for as long as this process has it. It is deleted by `close`, or at exit."""

    def __init__(self, purpose: str) -> None:
        """`purpose` is part of its name."""
        _delete_abandoned()
        self.path, lock = _make(f"{_PREFIX}{purpose}-")
        self._delete = weakref.finalize(self, _delete, self.path, lock)

    def close(self) -> None:
        """Delete it; repeating that is harmless."""
        self._delete()


def _make(prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))  # mode 0700
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)  # it was taken for an abandoned one before it was locked


def _delete(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _delete_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with suppress(OSError):  # it is in use, or somebody else's
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
