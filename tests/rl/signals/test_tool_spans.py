"""Spans show how a tool ended, for the tool call that they are matched to."""

import json
from typing import Any

import pytest
from toolconversations import SIX, USER, Conversation, assistant, result, tool_call

OTHER = '{"a": 1, "b": 0}'
GENAI: dict[str, Any] = {"openinference.span.kind": None, "gen_ai.operation.name": "execute_tool"}


def two_calls(*results: dict[str, Any]) -> Conversation:
    conversation = Conversation().turn([USER], assistant("", tool_call("1", "divide", OTHER), tool_call("2")))
    return conversation.turn(results or [result("1", "by zero"), result("2", "3")], assistant("Well."))


@pytest.mark.parametrize("attribute", ["gen_ai.tool.call.id", "tool_call.id", "tool.id"])
def test_a_span_with_the_id_of_a_tool_call_matches_it(attribute: str) -> None:
    conversation = two_calls().span("2", "divide", attributes={attribute: "2"})
    conversation.span("1", "divide", "error", at=1, attributes={attribute: "1"}, status_message="ValueError: by zero")
    assert conversation.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]
    failure, success = conversation.signals
    assert failure.span is not None and failure.span.span_id == "1" * 16
    assert success.span is not None and success.span.span_id == "2" * 16
    assert "ValueError: by zero" in failure.why


def test_a_span_without_an_id_is_matched_by_its_arguments() -> None:
    conversation = two_calls().span("2", "divide", attributes={"input.value": SIX}, at=0)
    conversation.span("1", "divide", "error", attributes={"input.value": '{"b":0,"a":1}'}, at=1)
    assert conversation.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


def test_a_span_without_arguments_is_matched_by_order_if_every_call_has_one() -> None:
    conversation = two_calls().span("2", "divide", at=2).span("1", "divide", "error", at=1)
    assert conversation.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


def test_an_ambiguous_span_is_not_matched() -> None:
    conversation = two_calls().span("1", "divide", "error")
    assert conversation.found == [("a", "tool_succeeded/1"), ("a", "tool_succeeded/2")]  # as the results say
    assert all(signal.span is None for signal in conversation.signals)


def test_a_tool_that_no_call_requested_is_not_matched() -> None:
    conversation = (
        two_calls().span("3", "remember", "error").span("4", "divide", "error", attributes={"input.value": '{"a":9}'})
    )
    assert all(signal.span is None for signal in conversation.signals)


def test_a_span_outweighs_a_text_that_resembles_an_error() -> None:
    conversation = two_calls(result("1", "Error bars: 0.3"), result("2", "Error: by zero"))
    assert conversation.found == [("a", "tool_failed/2")]
    conversation.span("1", "divide", attributes={"tool.id": "1"}).span("2", "divide", attributes={"tool.id": "2"})
    assert conversation.found == [("a", "tool_succeeded/1")]  # of the other, one says this and one says that


def test_a_span_is_enough_if_no_call_shows_the_result() -> None:
    conversation = (
        Conversation().turn([USER], assistant("", tool_call("1"))).span("1", "divide", attributes={"tool.id": "1"})
    )
    assert conversation.found == [("a", "tool_succeeded/1")]


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "error"},
        {"status": "unset", "events": ({"name": "exception", "attributes": {"exception.message": "by zero"}},)},
        {"status": "unset", "attributes": {"error.type": "tool_error"}},
    ],
)
def test_spans_of_the_genai_conventions_are_read(fields: dict[str, Any]) -> None:
    attributes = {**GENAI, "gen_ai.tool.call.id": "1", **fields.pop("attributes", {})}
    conversation = two_calls().span("1", "execute_tool divide", attributes=attributes, **fields)
    assert conversation.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


def test_a_span_with_unset_status_is_a_success() -> None:
    conversation = two_calls(result("1", "Failed tests: none"))
    conversation.span("1", "divide", "unset", attributes={**GENAI, "gen_ai.tool.call.id": "1"})
    assert conversation.found == [("a", "tool_succeeded/1")]


def test_a_span_with_status_ok_is_a_success_despite_an_exception() -> None:
    event = {"name": "exception", "attributes": {"exception.message": "too slow, tried again"}}
    conversation = two_calls(result("1", "3")).span("1", "divide", "ok", events=(event,), attributes={"tool.id": "1"})
    assert conversation.found == [("a", "tool_succeeded/1")]


def test_a_langchain_message_with_status_error_is_a_failure() -> None:
    data = {"content": "by zero", "tool_call_id": "1", "status": "error"}
    conversation = two_calls().span(
        "1", "divide", attributes={"output.value": json.dumps({"type": "tool", "data": data})}
    )
    assert conversation.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


def test_two_instrumentations_of_one_execution_count_once() -> None:
    conversation = two_calls().span("1", "divide", "error", at=1).span("2", "divide", at=3)
    conversation.span(
        "3", "divide", "unset", at=2, parent_id="1" * 16, attributes={**GENAI, "gen_ai.tool.name": "divide"}
    )
    assert conversation.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]
