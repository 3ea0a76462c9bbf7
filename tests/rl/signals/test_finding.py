"""Every signal is found on the call that caused it, in any dialect, and there are no others."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from randomness import examples
from toolconversations import DIVIDE, SIX, USER, Conversation, assistant, result, tool_call

from leyden.records import CallStatus, PromptOrigin, Sampling, Span
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


def test_a_failure_belongs_to_the_call_that_made_the_tool_call_not_to_the_one_that_shows_the_result() -> None:
    conversation = Conversation().turn([USER], assistant("", tool_call("1"), tool_call("2", "look", "{}")))
    conversation.turn([result("2"), result("1", "Error: nothing can be divided by zero")], assistant("I am sorry."))
    assert conversation.found == [("a", "tool_failed/1"), ("a", "tool_succeeded/2")]
    signal = conversation.signals[0]
    assert (signal.tool_call, signal.tool, signal.arguments) == ("1", "divide", {"a": 6, "b": 2})
    assert signal.result == "Error: nothing can be divided by zero"


def test_a_result_marked_as_an_error_is_a_failure_whatever_its_text() -> None:
    conversation = (
        Conversation()
        .turn([USER], assistant("", tool_call("1")))
        .turn([result("1", "3", is_error=True)], assistant("Oh."))
    )
    assert conversation.found == [("a", "tool_failed/1")]


def test_a_tool_call_without_a_result_has_no_signal() -> None:
    assert Conversation().turn([USER], assistant("", tool_call("1"))).found == []


def test_a_result_that_several_prompts_show_counts_once_and_as_first_shown() -> None:
    conversation = (
        Conversation()
        .turn([USER], assistant("", tool_call("1")))
        .turn([result("1", "Error: no such thing")], assistant("Oh."))
    )
    whole = [USER, assistant("", tool_call("1")), result("1", "(removed)"), assistant("Oh."), USER]
    conversation.turn(whole, assistant("Yes."), parent="a", kept_messages=0, prompt_origin=PromptOrigin.RERENDERED)
    assert conversation.found == [("a", "tool_failed/1")]


def test_a_reused_tool_call_id_belongs_to_its_own_conversation() -> None:
    conversation = Conversation().turn([USER], assistant("", tool_call("call_0")))
    conversation.turn(
        [USER], assistant("", tool_call("call_0", "look", "{}")), parent=None, kept_messages=0, tools=(DIVIDE,)
    )
    conversation.turn([result("call_0", "Error: it broke")], assistant("Oh."), parent="a", kept_messages=2)
    conversation.turn([result("call_0", "3")], assistant("Fine."), parent="b", kept_messages=2)
    assert conversation.found == [("a", "tool_failed/1"), ("b", "unknown_tool/1"), ("b", "tool_succeeded/1")]


@pytest.mark.parametrize("arguments", ['{"a": 6, "b":', "6, 2", "[6, 2]", "null", '{"a": NaN}'])
def test_arguments_that_are_not_a_json_object_are_malformed(arguments: str) -> None:
    conversation = Conversation().turn([USER], assistant("", tool_call("1", "divide", arguments)), policy="upstream")
    assert conversation.found == [("a", "malformed_call/1")]
    assert conversation.signals[0].arguments == arguments


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
def test_a_tool_call_that_cannot_be_parsed_is_found_in_the_text(text: str) -> None:
    assert Conversation().turn([USER], assistant(text)).found == [("a", "malformed_call")]


@pytest.mark.parametrize(
    "text", ["Write `<tool_call>` first.", 'The tag is "<tool_call>".', "2 < 3 and tool_call is a word"]
)
def test_text_about_tool_calls_is_not_a_tool_call(text: str) -> None:
    assert Conversation().turn([USER], assistant(text)).found == []


def test_without_tools_no_text_is_a_malformed_call() -> None:
    assert Conversation(tools=()).turn([USER], assistant("<tool_call>{")).found == []


def test_a_good_and_a_bad_call_of_one_answer_both_have_signals() -> None:
    conversation = Conversation().turn([USER], assistant("<tool_call>{</tool_call>", tool_call("1")))
    assert conversation.turn([result("1")], assistant("3")).found == [
        ("a", "malformed_call"),
        ("a", "tool_succeeded/1"),
    ]


def test_signals_of_one_kind_on_one_call_have_different_names() -> None:
    calls = [tool_call(str(n), f"multiply_{n}") for n in range(3)]
    assert Conversation().turn([USER], assistant("", *calls)).found == [("a", f"unknown_tool/{n}") for n in (1, 2, 3)]


def test_a_tool_is_unknown_if_it_was_not_offered_but_not_if_the_record_has_no_tools() -> None:
    answer = assistant("", tool_call("1", "multiply"))
    assert Conversation().turn([USER], answer).found == [("a", "unknown_tool/1")]
    assert Conversation(tools=()).turn([USER], answer).found == [("a", "unknown_tool/1")]
    assert Conversation(tools=None).turn([USER], answer).found == []


def test_the_tools_of_a_call_are_those_of_the_conversation_it_continues() -> None:
    conversation = (
        Conversation().turn([USER], assistant("Yes.")).turn([USER], assistant("", tool_call("1", "multiply")))
    )
    assert conversation.found == [("b", "unknown_tool/1")]


@pytest.mark.parametrize("arguments", ['{"a": 6}', '{"a": 6, "b": "2"}', '{"a": 6, "b": 2.5}'])
def test_arguments_that_break_the_schema_are_bad(arguments: str) -> None:
    conversation = Conversation().turn([USER], assistant("", tool_call("1", "divide", arguments)))
    assert conversation.found == [("a", "bad_arguments/1")]
    assert "$" in conversation.signals[0].why


@pytest.mark.parametrize("arguments", [SIX, '{"a": 6.0, "b": 2, "c": 1}'])
def test_arguments_that_match_the_schema_are_not_bad(arguments: str) -> None:
    assert Conversation().turn([USER], assistant("", tool_call("1", "divide", arguments))).found == []


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
def test_an_invalid_schema_gives_no_signal(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "divide", "parameters": schema}}
    assert Conversation(tools=[tool]).turn([USER], assistant("", tool_call("1"))).found == []


def test_an_answer_that_was_cut_has_no_other_signal() -> None:
    assert Conversation().turn([USER], assistant("<tool_call>{"), finish="length").found == [("a", "cut")]
    assert Conversation().turn([USER], assistant(""), finish="length").found == [("a", "cut")]
    conversation = Conversation().turn(
        [USER], assistant("", tool_call("1", "divide", '{"a": ')), finish="length", policy="upstream"
    )
    assert conversation.found == [("a", "cut")]


def test_a_call_that_samples_nothing_has_no_answer_to_judge() -> None:
    text = {"role": "text", "content": "Six is 3 times 2."}
    nothing = Sampling(max_tokens=0)
    assert Conversation().turn([text], assistant(""), finish="length", sampling=nothing).found == []


def test_an_answer_without_text_or_tool_call_is_empty_even_with_reasoning() -> None:
    assert Conversation().turn([USER], assistant(" \n")).found == [("a", "empty_answer")]
    assert Conversation().turn([USER], {**assistant(""), "reasoning_content": "Hm."}).found == [("a", "empty_answer")]
    assert Conversation().turn([USER], assistant("Hm.")).found == []


@pytest.mark.parametrize("status", [CallStatus.ABANDONED, CallStatus.FAILED])
def test_calls_that_did_not_complete_have_no_signals(status: CallStatus) -> None:
    conversation = Conversation().turn([USER], assistant("<tool_call>{"), status=status, finish=str(status))
    conversation.turn([USER], None, status=status, finish=str(status))
    assert conversation.found == []


def test_further_choices_of_a_request_have_their_own_signals() -> None:
    conversation = (
        Conversation()
        .turn([USER], assistant("Yes."))
        .turn([], assistant("", tool_call("1", "multiply")), choice=1, kept_messages=1)
    )
    assert conversation.found == [("b", "unknown_tool/1")]


def test_a_signal_knows_the_role_of_its_call() -> None:
    conversation = Conversation().turn([USER], assistant(""), span="1" * 16).turn([USER], assistant(""), role="writer")
    conversation.spans.append(
        Span("0" * 32, "1" * 16, None, "node", "internal", 0, 1, attributes={"agent.name": "planner"})
    )
    assert [(signal.kind, signal.role) for signal in conversation.signals] == [
        (SignalKind.EMPTY_ANSWER, "planner"),
        (SignalKind.EMPTY_ANSWER, "writer"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "a", "tool", "assistant", "{}", "Error: a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(200, share=2), deadline=None)
@given(st.lists(JSON, max_size=3), JSON, st.none() | st.lists(JSON, max_size=2), JSON)
def test_any_record_can_be_read(messages: list[Any], response: Any, tools: list[Any] | None, other: Any) -> None:
    conversation = Conversation(tools=tools).turn(messages, response).turn(messages, other)
    assert all(signal.name and signal.why for signal in conversation.signals)
