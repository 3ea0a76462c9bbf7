"""Captures what agents print in a host, per attempt, while it still goes to the standard streams.

The context determines the attempt. Output of child processes and writes to the file descriptor are not captured.
"""

import io
import sys
from typing import TextIO

from leyden.client.attempt.output_buffer import OutputBuffer
from leyden.client.tracing.context import current_attempt


class CapturedOutput:
    """Buffers the output of each running attempt."""

    def __init__(self) -> None:
        self._buffers: dict[str, OutputBuffer] = {}

    def install(self) -> None:
        """Replace the standard streams. Call it before the agent's modules are imported."""
        sys.stdout, sys.stderr = _CapturedStream(sys.stdout, self), _CapturedStream(sys.stderr, self)

    def begin(self, attempt: str) -> None:
        """Start capturing the output of an attempt."""
        self._buffers[attempt] = OutputBuffer()

    def so_far(self, attempt: str) -> str:
        """Return the output of an attempt so far."""
        buffer = self._buffers.get(attempt)
        return buffer.text() if buffer is not None else ""

    def end(self, attempt: str) -> str:
        """Stop capturing and return the output of an attempt."""
        buffer = self._buffers.pop(attempt, None)
        return buffer.text() if buffer is not None else ""

    def add(self, text: str) -> None:
        """Add text to the output of the current attempt, if any."""
        buffer = self._buffers.get(current_attempt() or "")
        if buffer is not None:
            buffer.add(text.encode(errors="backslashreplace"))


class _CapturedStream(io.TextIOWrapper):
    """A standard stream that also adds its text to the captured output."""

    def __init__(self, stream: TextIO, captured: CapturedOutput) -> None:
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", write_through=True)
        self._captured = captured

    def write(self, text: str) -> int:
        self._captured.add(text)
        return super().write(text)
