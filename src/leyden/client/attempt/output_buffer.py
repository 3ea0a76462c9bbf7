"""Buffers an attempt's output; keeps the beginning and the end and counts what is dropped."""

import threading

from leyden.decoding import decode_text

HEAD_BYTES = TAIL_BYTES = 32 * 1024
"""Bytes kept of the beginning and of the end."""


class OutputBuffer:
    """Collects output. Thread-safe."""

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._written = 0
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        """Append output."""
        with self._lock:
            self._written += len(data)
            if room := HEAD_BYTES - len(self._head):
                self._head += data[:room]
                data = data[room:]
            if data:
                self._tail += data[-TAIL_BYTES:]
                if len(self._tail) > 2 * TAIL_BYTES:  # rarely, so that the cost per short line is constant
                    del self._tail[:-TAIL_BYTES]

    def text(self) -> str:
        """Return the output; if it is too long, its beginning and end with a note in between."""
        with self._lock:
            tail = self._tail[-TAIL_BYTES:]
            dropped = self._written - len(self._head) - len(tail)
            note = f"\n... ({dropped} bytes dropped) ...\n".encode() if dropped else b""
            return decode_text(self._head + note + tail)
