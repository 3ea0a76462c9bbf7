"""A signal: one thing that a call did, which the record shows without anybody having scored it."""

from enum import StrEnum
from typing import Any

from msgspec import Struct

from leyden.records import Call, Span


class SignalKind(StrEnum):
    """What there is to see."""

    TOOL_FAILED = "tool_failed"
    TOOL_SUCCEEDED = "tool_succeeded"
    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    REPEATED_CALL = "repeated_call"
    CUT = "cut"
    EMPTY_ANSWER = "empty_answer"


Fact = tuple[SignalKind, str]
"""What was seen, and how it is known."""


class Signal(Struct, frozen=True):
    """Something that happened because of one model call, and how that is known."""

    kind: SignalKind
    call: Call
    """The call that caused it: the one whose answer holds the tool call, not the later one that shows its result."""
    why: str
    role: str | None = None
    place: int = 0
    """Which of the answer's tool calls it is about, from 1; 0: about the answer itself."""
    tool_call: str | None = None
    """The id of that tool call."""
    tool: str | None = None
    arguments: Any = None
    """The tool call's arguments; their text where it is no JSON object."""
    result: str | None = None
    """What the model was told of the tool call, where a later call shows it."""
    span: Span | None = None
    """The span in which the tool ran, where there is one."""

    @property
    def name(self) -> str:
        """Which signal of its call it is: no other of them has this name."""
        return f"{self.kind}/{self.place}" if self.place else str(self.kind)
