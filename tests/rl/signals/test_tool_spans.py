"""Spans say how a tool ended, for the tool call that it ran for."""

import json
from typing import Any

import pytest
from talks import SIX, USER, Talk, result, said, tool_call

OTHER = '{"a": 1, "b": 0}'
GENAI: dict[str, Any] = {"openinference.span.kind": None, "gen_ai.operation.name": "execute_tool"}


def two_calls(*results: dict[str, Any]) -> Talk:
    talk = Talk().turn([USER], said("", tool_call("1", "divide", OTHER), tool_call("2")))
    return talk.turn(results or [result("1", "by zero"), result("2", "3")], said("Well."))


@pytest.mark.parametrize("attribute", ["gen_ai.tool.call.id", "tool_call.id", "tool.id"])
def test_a_span_that_names_the_tool_call_is_its(attribute: str) -> None:
    talk = two_calls().span("2", "divide", attributes={attribute: "2"})
    talk.span("1", "divide", "error", at=1, attributes={attribute: "1"}, status_message="ValueError: by zero")
    assert talk.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]
    failure, success = talk.signals
    assert failure.span is not None and failure.span.span_id == "1" * 16
    assert success.span is not None and success.span.span_id == "2" * 16
    assert "ValueError: by zero" in failure.why


def test_one_without_an_id_is_known_by_its_arguments() -> None:
    talk = two_calls().span("2", "divide", attributes={"input.value": SIX}, at=0)
    talk.span("1", "divide", "error", attributes={"input.value": '{"b":0,"a":1}'}, at=1)
    assert talk.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


def test_one_without_arguments_is_known_by_its_place_where_all_calls_ran() -> None:
    talk = two_calls().span("2", "divide", at=2).span("1", "divide", "error", at=1)
    assert talk.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


def test_one_that_could_be_any_call_s_is_nobody_s() -> None:
    talk = two_calls().span("1", "divide", "error")
    assert talk.found == [("a", "tool_succeeded/1"), ("a", "tool_succeeded/2")]  # as the results say
    assert all(signal.span is None for signal in talk.signals)


def test_a_tool_that_the_agent_runs_by_itself_is_nobody_s() -> None:
    talk = (
        two_calls().span("3", "remember", "error").span("4", "divide", "error", attributes={"input.value": '{"a":9}'})
    )
    assert all(signal.span is None for signal in talk.signals)


def test_a_span_outweighs_a_text_that_sounds_like_an_error() -> None:
    talk = two_calls(result("1", "Error bars: 0.3"), result("2", "Error: by zero"))
    assert talk.found == [("a", "tool_failed/2")]
    talk.span("1", "divide", attributes={"tool.id": "1"}).span("2", "divide", attributes={"tool.id": "2"})
    assert talk.found == [("a", "tool_succeeded/1")]  # of the other, one says this and one says that


def test_a_span_tells_of_a_tool_whose_result_no_call_shows() -> None:
    talk = Talk().turn([USER], said("", tool_call("1"))).span("1", "divide", attributes={"tool.id": "1"})
    assert talk.found == [("a", "tool_succeeded/1")]


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "error"},
        {"status": "unset", "events": ({"name": "exception", "attributes": {"exception.message": "by zero"}},)},
        {"status": "unset", "attributes": {"error.type": "tool_error"}},
    ],
)
def test_spans_of_the_genai_conventions_say_it_too(fields: dict[str, Any]) -> None:
    attributes = {**GENAI, "gen_ai.tool.call.id": "1", **fields.pop("attributes", {})}
    talk = two_calls().span("1", "execute_tool divide", attributes=attributes, **fields)
    assert talk.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


def test_one_that_ended_without_a_word_ended_well() -> None:
    talk = two_calls(result("1", "Failed tests: none"))
    talk.span("1", "divide", "unset", attributes={**GENAI, "gen_ai.tool.call.id": "1"})
    assert talk.found == [("a", "tool_succeeded/1")]


def test_one_that_caught_an_exception_and_ended_well_ended_well() -> None:
    event = {"name": "exception", "attributes": {"exception.message": "too slow, tried again"}}
    talk = two_calls(result("1", "3")).span("1", "divide", "ok", events=(event,), attributes={"tool.id": "1"})
    assert talk.found == [("a", "tool_succeeded/1")]


def test_a_message_of_langchain_that_has_the_status_of_an_error_is_one() -> None:
    data = {"content": "by zero", "tool_call_id": "1", "status": "error"}
    talk = two_calls().span("1", "divide", attributes={"output.value": json.dumps({"type": "tool", "data": data})})
    assert talk.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]


def test_a_run_that_two_instrumentations_saw_is_one_run() -> None:
    talk = two_calls().span("1", "divide", "error", at=1).span("2", "divide", at=3)
    talk.span("3", "divide", "unset", at=2, parent_id="1" * 16, attributes={**GENAI, "gen_ai.tool.name": "divide"})
    assert talk.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]
