"""What a process leaves behind of its crash: Python's own account of a signal that killed it, in a file of its own."""

import faulthandler
import os
from tempfile import TemporaryFile

_LONGEST = 64 * 1024
_LINES = 20


class CrashReport:
    """The file, as the one who started the process has it. `watch` is for the process."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - it goes with this

    def fileno(self) -> int:
        """To be inherited."""
        return self._file.fileno()

    def read(self) -> str:
        """The fatal error and the stack of the thread that it was in, innermost first; nothing where there was none."""
        text = os.pread(self.fileno(), _LONGEST, 0).decode(errors="replace")
        fatal, _, threads = text.partition("\n\n")
        current = [block for block in threads.split("\n\n") if block.startswith("Current thread")]
        stack = current[0].splitlines()[: _LINES + 1] if current else []
        return "\n".join([fatal, *stack]) if fatal.startswith("Fatal") else ""


def watch(fd: int) -> None:
    """Have a crash of this process written there."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd, all_threads=True)
