"""Tools that an agent runs itself belong to the answer before them, if the spans of calls show which one that is."""

from typing import Any

import pytest
from toolconversations import USER, Conversation, assistant, result, tool_call


def conversation(*spans: tuple[str, int, int]) -> Conversation:
    """Two answers without tool calls, made within spans of these ids, starts and ends."""
    made = Conversation(tools=None)
    for id, start, end in spans:
        step: dict[str, Any] = {"openinference.span.kind": "CHAIN", "tool.name": None}
        made.turn([USER], assistant("SELECT 1"), span=id * 16)
        made.span(id, "node", at=start, attributes=step, length=end - start)
    return made


def test_a_tool_belongs_to_the_answer_before_it() -> None:
    found = conversation(("1", 0, 10), ("2", 30, 40)).span("8", "query", "error", at=12, status_message="no such table")
    found.span("9", "query", at=42, attributes={"input.value": '{"sql": "SELECT 1"}'})
    assert found.found == [("a", "tool_failed/1"), ("b", "tool_succeeded/1")]
    failure, success = found.signals
    assert "no such table" in failure.why and failure.tool == success.tool == "query"
    assert success.arguments == {"sql": "SELECT 1"} and success.span is not None


def test_each_of_several_tools_is_a_signal() -> None:
    found = conversation(("1", 0, 10)).span("8", "query", "error", at=12).span("9", "query", at=14)
    assert found.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


@pytest.mark.parametrize(
    "spans",
    [(("1", 0, 10), ("2", 11, 40)), (("1", 20, 30), ("2", 21, 40))],
    ids=["another call is open", "none before"],
)
def test_otherwise_it_belongs_to_none(spans: tuple[tuple[str, int, int], ...]) -> None:
    assert conversation(*spans).span("9", "query", "error", at=12).found == []


def test_without_the_span_of_every_call_it_belongs_to_none() -> None:
    found = conversation(("1", 0, 10)).turn([USER], assistant("SELECT 2")).span("9", "query", "error", at=12)
    assert found.found == []


def test_an_answer_with_tool_calls_has_only_those() -> None:
    found = Conversation().turn([USER], assistant("", tool_call("1")), span="1" * 16)
    found.turn([result("1")], assistant("Three."), span="2" * 16)
    for id, at in (("1", 0), ("2", 30)):
        found.span(id, "node", at=at, attributes={"openinference.span.kind": "CHAIN"})
    found.span("9", "log", "error", at=12)
    assert found.found == [("a", "tool_succeeded/1")]
