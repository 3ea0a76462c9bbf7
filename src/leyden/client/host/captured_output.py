"""What agents print in a host goes where it always went, and is kept with the attempt that printed it.

Whose it is follows from the context, as with requests. What a process that the agent started prints, or code that
writes to the descriptor itself, goes only where it always went.
"""

import io
import sys
from typing import TextIO

from leyden.client.attempt.output_buffer import OutputBuffer
from leyden.client.tracing.context import current_attempt


class CapturedOutput:
    """What each of the attempts under way has printed."""

    def __init__(self) -> None:
        self._outputs: dict[str, OutputBuffer] = {}

    def install(self) -> None:
        """Take the place of this process's standard streams; before the agent's modules are imported."""
        sys.stdout, sys.stderr = _Shared(sys.stdout, self), _Shared(sys.stderr, self)

    def begin(self, attempt: str) -> None:
        """Keep what an attempt prints from now on."""
        self._outputs[attempt] = OutputBuffer()

    def so_far(self, attempt: str) -> str:
        """What an attempt has printed."""
        output = self._outputs.get(attempt)
        return output.text() if output is not None else ""

    def end(self, attempt: str) -> str:
        """What an attempt has printed; what it prints later is not kept."""
        output = self._outputs.pop(attempt, None)
        return output.text() if output is not None else ""

    def keep(self, text: str) -> None:
        """Keep a piece of text with the attempt in whose context this is called, if any."""
        output = self._outputs.get(current_attempt() or "")
        if output is not None:
            output.add(text.encode(errors="backslashreplace"))


class _Shared(io.TextIOWrapper):
    """A standard stream that is listened to."""

    def __init__(self, stream: TextIO, outputs: CapturedOutput) -> None:
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", write_through=True)
        self._outputs = outputs

    def write(self, text: str) -> int:
        self._outputs.keep(text)
        return super().write(text)
