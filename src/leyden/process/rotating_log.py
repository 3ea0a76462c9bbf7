"""Writes the output of child processes to a log file of bounded size.

Children write to a pipe, which a thread of this process copies: the file never grows beyond the limit, however fast
they write. A full disk loses output and never blocks a child.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

from leyden.decoding import decode_text

MAX_BYTES = 16 << 20
"""Size at which a log becomes `NAME.log.1`, in place of the one before."""
_CHUNK_BYTES, _TAIL_BYTES = 1 << 16, 1 << 16
_DRAIN_TIMEOUT_S = 1.0


class RotatingLog:
    """One log file, and the one before it."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._file: int | None = None
        self._size = 0
        self._tail = b""
        self._lock = threading.Lock()
        self._copying: threading.Thread | None = None

    def open(self) -> int:
        """Return a new pipe that is copied to the log. The caller closes it after its child has inherited it."""
        reading, writing = os.pipe()
        self._tail = b""
        with self._lock, suppress(OSError):
            self._write(b"")  # the file is there from the start
        self._copying = threading.Thread(target=self._copy, args=(reading,), name="leyden-log", daemon=True)
        self._copying.start()
        return writing

    def tail(self) -> str:
        """Return the end of what was written since `open`. A child that has ended is waited for, at most a second."""
        if self._copying is not None:
            self._copying.join(_DRAIN_TIMEOUT_S)  # a descendant of the child may hold the pipe open
        with self._lock:
            return decode_text(self._tail)

    def last_line(self) -> str | None:
        """Return the last line since `open` that is not blank; None if there is none."""
        lines = self.tail().strip().splitlines()
        return lines[-1] if lines else None

    def _copy(self, pipe: int) -> None:
        while data := os.read(pipe, _CHUNK_BYTES):
            with self._lock:
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                with suppress(OSError):
                    self._write(data)
        os.close(pipe)

    def _write(self, data: bytes) -> None:
        if self._file is not None and self._size + len(data) > self._max_bytes:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            os.close(self._file)
            self._file = None
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._size = os.fstat(self._file).st_size
        while data:
            written = os.write(self._file, data)
            self._size += written
            data = data[written:]

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class TerminalLog(RotatingLog):
    """Copies the output to this process's standard error."""

    def __init__(self) -> None:
        super().__init__(Path("/dev/stderr"))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(2, data) :]
