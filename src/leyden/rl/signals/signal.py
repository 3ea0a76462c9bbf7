"""A signal: something that a call did and that the record shows without a reward function."""

from enum import StrEnum
from typing import Any

from msgspec import Struct

from leyden.records import Call, Span


class SignalKind(StrEnum):
    """The kinds of signals; `docs/signals.md` describes each."""

    TOOL_FAILED = "tool_failed"
    TOOL_SUCCEEDED = "tool_succeeded"
    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    REPEATED_CALL = "repeated_call"
    CUT = "cut"
    EMPTY_ANSWER = "empty_answer"


Evidence = tuple[SignalKind, str]
"""A kind of signal, and why it was detected."""


class Signal(Struct, frozen=True):
    """Something that one model call caused, and why it was detected."""

    kind: SignalKind
    call: Call
    """The call whose answer has the tool call, not the later one whose prompt shows the result."""
    why: str
    role: str | None = None
    position: int = 0
    """Number of the tool call in the answer, from 1; 0 for a signal about the whole answer."""
    tool_call: str | None = None
    """Id of the tool call."""
    tool: str | None = None
    arguments: Any = None
    """Arguments of the tool call; their text if they are not a JSON object."""
    result: str | None = None
    """Result of the tool call, if a later call's prompt shows it."""
    span: Span | None = None
    """The span in which the tool ran, if there is one."""

    @property
    def name(self) -> str:
        """Name of the signal, unique among those of its call."""
        return f"{self.kind}/{self.position}" if self.position else str(self.kind)
