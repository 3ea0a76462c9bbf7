"""Waits for room on a disk that is full: a run must not end because of that, nor wait without a word."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from shutil import disk_usage

from leyden.backoff import Backoff

_BACKOFF = Backoff(first_s=0.2, max_s=10.0)
_FULL_BYTES = 1 << 20
"""With so little left a store may not be able to write any more."""


def is_disk_full(error: Exception) -> bool:
    """Whether an error of writing a file says that there is no room for it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


async def when_there_is_room(
    what: str, write: Callable[[], Awaitable[object] | None], warn: Callable[[str], None]
) -> None:
    """Write something; while the disk is full, wait and try again. `warn` is told once."""
    failures = 0
    while True:
        try:
            writing = write()
            if writing is not None:
                await writing
            return
        except OSError as error:
            if not is_disk_full(error):
                raise
            failures += 1
            if failures == 1:
                warn(f"{what} cannot be written ({error}): waiting for room")
        await _BACKOFF.wait(failures)


async def watch_room(folder: Path, report: Callable[[str], None], interval_s: float = 5.0) -> None:
    """Report when the disk of a folder is full, and when it has room again: logs on that disk cannot say so."""
    full = False
    while True:
        try:
            free = disk_usage(folder).free
        except OSError:  # the folder was removed, which ends the run
            return
        if full != (free < _FULL_BYTES):
            full = not full
            waits = f"is full, {free >> 10} KiB are left: what cannot be written waits until there is room"
            report(f"the disk of {folder} {waits if full else 'has room again'}")
        await asyncio.sleep(interval_s)
