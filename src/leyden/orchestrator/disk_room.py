"""Waits for room on a disk that is full: a run must not end because of that."""

import errno
from collections.abc import Awaitable, Callable

from leyden.backoff import Backoff

_BACKOFF = Backoff(first_s=0.2, max_s=10.0)


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
