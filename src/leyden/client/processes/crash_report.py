"""Passes Python's report of a fatal signal, or that of a guardian, to the parent process, through a temporary file."""

import faulthandler
import os
from tempfile import TemporaryFile

from leyden.decoding import decode_text

_MAX_BYTES = 64 * 1024
_MAX_LINES = 20


class CrashReport:
    """The parent's side: creates the file, whose descriptor the child inherits, and reads it."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - closed by `close`, or with this object

    def fileno(self) -> int:
        """Return the descriptor that the child inherits."""
        return self._file.fileno()

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def read(self) -> str:
        """Return the fatal error and the stack of its thread, innermost first, or what else was written."""
        text = decode_text(os.pread(self.fileno(), _MAX_BYTES, 0))
        fatal, _, threads = text.partition("\n\n")
        current = [block for block in threads.split("\n\n") if block.startswith("Current thread")]
        stack = current[0].splitlines()[: _MAX_LINES + 1] if current else []
        return "\n".join([fatal, *stack]) if fatal.startswith("Fatal") else text.strip()


def write_to(fd: int) -> None:
    """Write a crash of this process to the file. The child calls this."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd, all_threads=True)
