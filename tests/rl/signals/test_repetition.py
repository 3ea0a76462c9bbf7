"""A tool call is repeated if nothing has changed since it was made before."""

from typing import Any

import pytest
from toolconversations import SIX, USER, Conversation, assistant, result, tool_call

from leyden.records import Call
from leyden.rl.signals import repetition
from leyden.rl.signals.tool_calls import ObservedToolCall, tool_calls_of

READ, WRITE = ("look", '{"at": "file"}'), ("divide", SIX)


def repetitions(*answers: Any) -> list[str]:
    """Return the calls that repeat earlier ones; each answer is a list of tool calls with their results."""
    conversation, new = Conversation(), [USER]
    for number, tool_calls in enumerate(answers):
        ids = [f"{number}-{position}" for position in range(len(tool_calls))]
        calls = [tool_call(id, name, arguments) for id, (name, arguments, _) in zip(ids, tool_calls, strict=True)]
        conversation.turn(new, assistant("", *calls))
        new = [result(id, text) for id, (_, _, text) in zip(ids, tool_calls, strict=True)]
    conversation.turn(new, assistant("Done."))
    return [f"{signal.call.id}{signal.position}" for signal in conversation.signals if signal.kind == "repeated_call"]


def test_the_same_call_again_is_repeated_however_it_is_written() -> None:
    assert repetitions([("look", '{"a":1,"b":2}', "x")], [("look", '{ "b": 2, "a": 1 }', "x")]) == ["b1"]


def test_other_arguments_or_another_tool_are_another_call() -> None:
    assert repetitions([("look", '{"a":1}', "x")], [("look", '{"a":2}', "x")], [("divide", '{"a":2}', "x")]) == []


def test_a_call_with_a_different_result_is_not_repeated() -> None:
    assert repetitions([(*READ, "waiting")], [(*READ, "done")], [(*READ, "done")]) == ["c1"]


def test_reading_again_after_writing_is_not_repeated_and_alternating_is() -> None:
    assert repetitions([(*READ, "x")], [(*WRITE, "ok")], [(*READ, "x")]) == []
    assert repetitions([(*READ, "x")], [(*WRITE, "ok")], [(*READ, "x")], [(*WRITE, "ok")], [(*READ, "x")]) == [
        "d1",
        "e1",
    ]


def test_calls_of_one_answer_are_concurrent() -> None:
    assert repetitions([(*READ, "x"), (*READ, "x")]) == ["a2"]
    assert repetitions([("look", "{}", "heads"), ("look", "{}", "tails")]) == []
    assert repetitions([(*READ, "x"), (*WRITE, "ok")], [(*READ, "x"), (*WRITE, "ok")]) == ["b1", "b2"]


def test_the_last_call_can_be_repeated_without_a_result() -> None:
    conversation = (
        Conversation().turn([USER], assistant("", tool_call("1"))).turn([result("1")], assistant("", tool_call("2")))
    )
    assert conversation.found == [("a", "tool_succeeded/1"), ("b", "repeated_call/1")]


def test_a_call_after_a_new_user_message_is_not_repeated() -> None:
    conversation = Conversation().turn([USER], assistant("", tool_call("1"))).turn([result("1")], assistant("It is 3."))
    conversation.turn([USER], assistant("", tool_call("2"))).turn([result("2")], assistant("Still 3."))
    assert ("c", "repeated_call/1") not in conversation.found


def test_another_conversation_of_the_rollout_does_not_matter() -> None:
    conversation = Conversation().turn([USER], assistant("", tool_call("1"))).turn([result("1")], assistant("It is 3."))
    conversation.turn([USER], assistant("", tool_call("2")), parent=None, kept_messages=0)
    assert conversation.found == [("a", "tool_succeeded/1")]


def test_branches_of_a_conversation_do_not_see_each_other() -> None:
    conversation = Conversation().turn([USER], assistant("", tool_call("1")))
    conversation.turn([result("1")], assistant("", tool_call("2", "look", "{}")))
    conversation.turn([result("1")], assistant("", tool_call("3", "look", "{}")), parent="a", kept_messages=2)
    assert [name for _, name in conversation.found if name.startswith("repeated")] == []


def test_each_message_of_a_long_conversation_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def noted(call: Call, message: Any) -> list[ObservedToolCall]:
        read.append(message)
        return tool_calls_of(call, message)

    monkeypatch.setattr(repetition, "tool_calls_of", noted)
    assert len(repetitions(*[[(*READ, "x")]] * 20)) == 19
    assert len(read) == 19  # of the last answer no prompt tells
