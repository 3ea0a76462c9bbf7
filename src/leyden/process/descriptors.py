"""The limit of open files and sockets of this process and its children."""

import resource
from contextlib import suppress


def raise_file_limit() -> None:
    """Raise the soft limit to the hard limit, because every worker holds a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
