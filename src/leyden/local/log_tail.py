"""Reads the end of a child process's log, for the message about its failure."""

from pathlib import Path

from leyden.decoding import decode_text


class LogTail:
    """Reads what is appended to a log file after this object is created."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = path.stat().st_size if path.exists() else 0

    def last_line(self) -> str | None:
        """Return the last line that is not blank; None where there is none."""
        lines = decode_text(self.path.read_bytes()[self._start :]).strip().splitlines()
        return lines[-1] if lines else None
