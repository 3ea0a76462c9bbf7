"""What an attempt printed, bounded: the beginning, the end, and how much is missing in between."""

import threading

FIRST = LAST = 32 * 1024
"""Bytes that are kept of the beginning and of the end."""


class OutputBuffer:
    """Takes what is written, from any thread."""

    def __init__(self) -> None:
        self._first, self._last = bytearray(), bytearray()
        self._written = 0
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        """Keep what is written, as far as there is room."""
        with self._lock:
            self._written += len(data)
            if room := FIRST - len(self._first):
                self._first += data[:room]
                data = data[room:]
            if data:
                self._last += data[-LAST:]
                if len(self._last) > 2 * LAST:  # seldom, so that many short lines cost no more than one long one
                    del self._last[:-LAST]

    def text(self) -> str:
        """All of it, or its two ends."""
        with self._lock:
            last = self._last[-LAST:]
            cut = self._written - len(self._first) - len(last)
            note = f"\n... ({cut} bytes are left out here) ...\n".encode() if cut else b""
            return (bytes(self._first) + note + bytes(last)).decode(errors="replace")
