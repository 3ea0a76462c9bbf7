"""Every signal is found on the call that caused it, whatever the dialect, and nothing else is."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from talks import DIVIDE, SIX, USER, Talk, result, said, tool_call

from leyden.records import CallStatus, PromptOrigin, Span
from leyden.rl.signals import SignalKind

WORDS = [
    "role",
    "content",
    "tool_calls",
    "id",
    "function",
    "name",
    "arguments",
    "parameters",
    "tool_call_id",
    "is_error",
]


def test_a_failure_is_the_call_s_that_made_the_tool_call_not_the_one_s_that_shows_the_result() -> None:
    talk = Talk().turn([USER], said("", tool_call("1"), tool_call("2", "look", "{}")))
    talk.turn([result("2"), result("1", "Error: nothing can be divided by zero")], said("I am sorry."))
    assert talk.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]
    signal = talk.signals[0]
    assert (signal.tool_call, signal.tool, signal.arguments) == ("1", "divide", {"a": 6, "b": 2})
    assert signal.result == "Error: nothing can be divided by zero"


def test_a_result_that_is_marked_as_an_error_is_one_whatever_it_says() -> None:
    talk = Talk().turn([USER], said("", tool_call("1"))).turn([result("1", "3", is_error=True)], said("Oh."))
    assert talk.found == [("a", "tool_failed/1")]


def test_a_tool_call_without_a_result_says_nothing() -> None:
    assert Talk().turn([USER], said("", tool_call("1"))).found == []


def test_a_result_that_is_shown_again_counts_once_and_as_it_was_first_shown() -> None:
    talk = Talk().turn([USER], said("", tool_call("1"))).turn([result("1", "Error: no such thing")], said("Oh."))
    whole = [USER, said("", tool_call("1")), result("1", "(removed)"), said("Oh."), USER]
    talk.turn(whole, said("Yes."), parent="a", kept_messages=0, made=PromptOrigin.RERENDERED)
    assert talk.found == [("a", "tool_failed/1")]


def test_ids_that_are_not_unique_belong_to_the_conversation_they_are_in() -> None:
    talk = Talk().turn([USER], said("", tool_call("call_0")))
    talk.turn([USER], said("", tool_call("call_0", "look", "{}")), parent=None, kept_messages=0, tools=(DIVIDE,))
    talk.turn([result("call_0", "Error: it broke")], said("Oh."), parent="a", kept_messages=2)
    talk.turn([result("call_0", "3")], said("Fine."), parent="b", kept_messages=2)
    assert talk.found == [("a", "tool_failed/1"), ("b", "unknown_tool/1"), ("b", "tool_succeeded/1")]


@pytest.mark.parametrize("arguments", ['{"a": 6, "b":', "6, 2", "[6, 2]", "null", '{"a": NaN}'])
def test_arguments_that_are_no_json_object_are_malformed(arguments: str) -> None:
    talk = Talk().turn([USER], said("", tool_call("1", "divide", arguments)), policy="upstream")
    assert talk.found == [("a", "malformed_call/1")]
    assert talk.signals[0].arguments == arguments


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "divide", "arguments": {"a": 6,}}\n</tool_call>',
        'Let me see.<tool_call>{"name": "divide"',
        "<tool_call>\n<function=divide>\n<parameter=a>6</tool_call>",
        '<|tool_call_begin|>functions.divide:0<|tool_call_argument_begin|>{"a": 6<|tool_call_end|>',
        "<minimax:tool_call><invoke>6</invoke></minimax:tool_call>",
        '<|python_tag|>{"name": "divide", "parameters": }',
    ],
)
def test_a_tool_call_that_cannot_be_read_stands_in_the_text(text: str) -> None:
    assert Talk().turn([USER], said(text)).found == [("a", "malformed_call")]


@pytest.mark.parametrize(
    "text", ["Write `<tool_call>` first.", 'The tag is "<tool_call>".', "2 < 3 and tool_call is a word"]
)
def test_text_about_tool_calls_is_no_tool_call(text: str) -> None:
    assert Talk().turn([USER], said(text)).found == []


def test_where_no_tools_are_offered_text_is_text() -> None:
    assert Talk(tools=()).turn([USER], said("<tool_call>{")).found == []


def test_both_a_good_and_a_bad_call_of_one_answer_are_seen() -> None:
    talk = Talk().turn([USER], said("<tool_call>{</tool_call>", tool_call("1")))
    assert talk.turn([result("1")], said("3")).found == [("a", "malformed_call"), ("a", "tool_succeeded/1")]


def test_several_signals_of_one_kind_on_one_call_all_have_names() -> None:
    calls = [tool_call(str(n), f"multiply_{n}") for n in range(3)]
    assert Talk().turn([USER], said("", *calls)).found == [("a", f"unknown_tool/{n}") for n in (1, 2, 3)]


def test_a_tool_is_unknown_where_others_or_none_are_offered_and_not_where_nobody_knows() -> None:
    answer = said("", tool_call("1", "multiply"))
    assert Talk().turn([USER], answer).found == [("a", "unknown_tool/1")]
    assert Talk(tools=()).turn([USER], answer).found == [("a", "unknown_tool/1")]
    assert Talk(tools=None).turn([USER], answer).found == []


def test_the_tools_of_a_call_are_those_of_the_conversation_it_continues() -> None:
    talk = Talk().turn([USER], said("Yes.")).turn([USER], said("", tool_call("1", "multiply")))
    assert talk.found == [("b", "unknown_tool/1")]


@pytest.mark.parametrize("arguments", ['{"a": 6}', '{"a": 6, "b": "2"}', '{"a": 6, "b": 2.5}'])
def test_arguments_that_break_the_schema_are_bad(arguments: str) -> None:
    talk = Talk().turn([USER], said("", tool_call("1", "divide", arguments)))
    assert talk.found == [("a", "bad_arguments/1")]
    assert "$" in talk.signals[0].why


@pytest.mark.parametrize("arguments", [SIX, '{"a": 6.0, "b": 2, "c": 1}'])
def test_arguments_that_keep_to_the_schema_are_not(arguments: str) -> None:
    assert Talk().turn([USER], said("", tool_call("1", "divide", arguments))).found == []


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {"type": "no type"},
        {"$ref": "http://127.0.0.1:1/elsewhere.json"},
        {"$ref": "#/$defs/missing"},
        {"properties": {"a": {"$ref": "#"}}, "$ref": "#"},
        {"properties": {"a": {"type": "string", "pattern": "("}}, "$schema": []},
    ],
)
def test_a_schema_that_is_not_sound_breaks_nothing(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "divide", "parameters": schema}}
    assert Talk(tools=[tool]).turn([USER], said("", tool_call("1"))).found == []


def test_an_answer_that_was_cut_is_that_and_nothing_else() -> None:
    assert Talk().turn([USER], said("<tool_call>{"), finish="length").found == [("a", "cut")]
    assert Talk().turn([USER], said(""), finish="length").found == [("a", "cut")]
    talk = Talk().turn([USER], said("", tool_call("1", "divide", '{"a": ')), finish="length", policy="upstream")
    assert talk.found == [("a", "cut")]


def test_an_answer_without_text_or_tool_call_is_empty_whatever_it_thought() -> None:
    assert Talk().turn([USER], said(" \n")).found == [("a", "empty_answer")]
    assert Talk().turn([USER], {**said(""), "reasoning_content": "Hm."}).found == [("a", "empty_answer")]
    assert Talk().turn([USER], said("Hm.")).found == []


@pytest.mark.parametrize("status", [CallStatus.ABANDONED, CallStatus.FAILED])
def test_calls_that_did_not_come_to_their_end_have_no_signals(status: CallStatus) -> None:
    talk = Talk().turn([USER], said("<tool_call>{"), status=status, finish=str(status))
    talk.turn([USER], None, status=status, finish=str(status))
    assert talk.found == []


def test_further_choices_of_a_request_have_signals_of_their_own() -> None:
    talk = Talk().turn([USER], said("Yes.")).turn([], said("", tool_call("1", "multiply")), choice=1, kept_messages=1)
    assert talk.found == [("b", "unknown_tool/1")]


def test_a_signal_knows_the_role_of_its_call() -> None:
    talk = Talk().turn([USER], said(""), span="1" * 16).turn([USER], said(""), role="writer")
    talk.spans.append(Span("0" * 32, "1" * 16, None, "node", "internal", 0, 1, attributes={"agent.name": "planner"}))
    assert [(signal.kind, signal.role) for signal in talk.signals] == [
        (SignalKind.EMPTY_ANSWER, "planner"),
        (SignalKind.EMPTY_ANSWER, "writer"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "a", "tool", "assistant", "{}", "Error: a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(JSON, max_size=3), JSON, st.none() | st.lists(JSON, max_size=2), JSON)
def test_whatever_was_recorded_can_be_read(
    messages: list[Any], response: Any, tools: list[Any] | None, other: Any
) -> None:
    talk = Talk(tools=tools).turn(messages, response).turn(messages, other)
    assert all(signal.name and signal.why for signal in talk.signals)
