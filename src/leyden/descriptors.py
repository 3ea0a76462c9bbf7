"""How many files and sockets this process, and what it starts, may have open."""

import resource
from contextlib import suppress


def raise_file_limit() -> None:
    """Take as many as one may: a thousand workers are a thousand sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
