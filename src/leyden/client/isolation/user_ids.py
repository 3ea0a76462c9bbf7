"""Allocates user ids: one for each process with agent code that runs at a time on this machine."""

import fcntl
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from leyden.client.isolation.options import SandboxUnavailable

FIRST, LAST = 58_000, 59_999
"""Within the 65,536 ids that containers map, and at the end of the range in which systems create users."""
_LOCKS = Path("/run/lock/leyden-user-ids")
_SCRATCH = "leyden-agent-"


class AllocatedUser(NamedTuple):
    """A user id and its scratch folder; held by a lock until `release`."""

    id: int
    scratch: Path
    lock: int

    def release(self) -> None:
        """Remove the scratch folder and free the id. No process of the user may run any more."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        os.close(self.lock)

    def release_in_child(self) -> "subprocess.Popen[bytes] | None":
        """Do the same in a child process, which has the id until the folder is gone; None if that was so at once."""
        try:
            self.scratch.rmdir()
        except FileNotFoundError:
            pass
        except OSError:  # it is not empty
            command = ("rm", "-rf", "--", str(self.scratch))
            try:
                child = subprocess.Popen(command, pass_fds=(self.lock,), stderr=subprocess.DEVNULL)
            except OSError:  # no process can be started
                self.release()
                return None
            os.close(self.lock)  # the child holds the lock too
            return child
        os.close(self.lock)
        return None


def allocate_user() -> AllocatedUser:
    """Return a user id that is allocated to no other process on this machine. Needs root."""
    for number in range(FIRST, LAST + 1):
        lock = _lock(number)
        if lock is None:
            continue
        if _is_free(number):
            _remove_scratch(number)
            scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{number}-"))
            os.chown(scratch, number, number)
            return AllocatedUser(number, scratch, lock)
        os.close(lock)
    raise SandboxUnavailable(f"all user ids from {FIRST} to {LAST} are in use")


def remove_abandoned_scratch() -> None:
    """Remove the scratch folders that killed workers have left on this machine. Needs root."""
    found = (folder.name.removeprefix(_SCRATCH) for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"))
    for number in {int(digits) for name in found if (digits := name.partition("-")[0]).isdecimal()}:
        if FIRST <= number <= LAST and (lock := _lock(number)) is not None:
            _remove_scratch(number)
            os.close(lock)


def _lock(number: int) -> int | None:
    """Lock a user id; return the descriptor that holds the lock, or None if another process holds it."""
    _LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(_LOCKS / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _remove_scratch(number: int) -> None:
    """Remove the scratch folders that a killed worker has left to a user id. Its lock must be held."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}{number}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _is_free(number: int) -> bool:
    try:
        pwd.getpwuid(number)
    except KeyError:
        return True
    return False
