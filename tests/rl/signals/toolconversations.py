"""Builds episodes by hand, as the gateway records them, and lists their signals in a form that is easy to compare."""

from collections.abc import Sequence
from typing import Any

from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Attempt, Call, Purpose, Rollout, Span, State, Task
from leyden.rl.signals import Signal, find

NUMBER = {"type": "integer"}
DIVIDE: Any = {
    "type": "function",
    "function": {
        "name": "divide",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    },
}
LOOK: Any = {"type": "function", "function": {"name": "look"}}
USER: Any = {"role": "user", "content": "Well?"}
SIX = '{"a": 6, "b": 2}'


def tool_call(id: str, name: str = "divide", arguments: str = SIX) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str, text: str = "3", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text, **fields}


def assistant(text: str = "", *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


class Conversation:
    """A conversation: each call continues the previous one with new messages; ids are a, b, c, ..."""

    def __init__(self, tools: Sequence[Any] | None = (DIVIDE, LOOK)) -> None:
        self.calls: list[Call] = []
        self.spans: list[Span] = []
        self._tools = None if tools is None else tuple(tools)

    def turn(self, new: Sequence[Any], response: Any, **fields: Any) -> "Conversation":
        """Add a call with these new messages and this answer."""
        before = self.calls[-1] if self.calls else None
        kept = before.kept_messages + len(before.messages) + 1 if before is not None else 0
        own = {
            "id": chr(ord("a") + len(self.calls)),
            "parent": before.id if before is not None else None,
            "kept_messages": kept,
            "tools": self._tools if before is None else None,
            "finish": "tool_calls" if isinstance(response, dict) and response.get("tool_calls") else "stop",
        }
        self.calls.append(Call(messages=tuple(new), response=response, **{**own, **fields}))
        return self

    def span(
        self, id: str, name: str, status: Any = "ok", at: int = 0, length: int = 1, **fields: Any
    ) -> "Conversation":
        """Add the span of a tool, in OpenInference's format unless its attributes say otherwise."""
        attributes = {"openinference.span.kind": "TOOL", "tool.name": name, **fields.pop("attributes", {})}
        own = {"trace_id": "0" * 32, "span_id": id * 16, "parent_id": None, "name": name, "kind": "internal"}
        self.spans.append(
            Span(**{**own, **fields}, start_ns=at, end_ns=at + length, status=status, attributes=attributes)
        )
        return self

    @property
    def episode(self) -> Episode:
        rollout = Rollout("g.0", "r", "g", "t", 0, Purpose.TRAIN, State.FINISHED, 1, 3, 0.0)
        attempt = Attempt("g.0.1", "r", "g.0", 1, "w", None, 0.0, 9.0, 1.0, Outcome(Ending.SUCCEEDED))
        return Episode(rollout, attempt, Task("t", {}), tuple(self.calls), tuple(self.spans))

    @property
    def found(self) -> list[tuple[str, str]]:
        """Call and name of each signal."""
        return [(signal.call.id, signal.name) for signal in self.signals]

    @property
    def signals(self) -> list[Signal]:
        return find(self.episode)
