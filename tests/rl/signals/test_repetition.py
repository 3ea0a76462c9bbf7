"""A tool call is repeated where nothing has changed since it was made before."""

from typing import Any

from talks import SIX, USER, Talk, result, said, tool_call

READ, WRITE = ("look", '{"at": "file"}'), ("divide", SIX)


def played(*answers: Any) -> list[str]:
    """Which calls repeat: each answer is a list of tool calls with their results."""
    talk, new = Talk(), [USER]
    for number, asked in enumerate(answers):
        ids = [f"{number}-{place}" for place in range(len(asked))]
        calls = [tool_call(id, name, arguments) for id, (name, arguments, _) in zip(ids, asked, strict=True)]
        talk.turn(new, said("", *calls))
        new = [result(id, text) for id, (_, _, text) in zip(ids, asked, strict=True)]
    talk.turn(new, said("Done."))
    return [f"{signal.call.id}{signal.position}" for signal in talk.signals if signal.kind == "repeated_call"]


def test_the_same_call_again_is_repeated_however_it_is_written() -> None:
    assert played([("look", '{"a":1,"b":2}', "x")], [("look", '{ "b": 2, "a": 1 }', "x")]) == ["b1"]


def test_other_arguments_or_another_tool_are_another_call() -> None:
    assert played([("look", '{"a":1}', "x")], [("look", '{"a":2}', "x")], [("divide", '{"a":2}', "x")]) == []


def test_a_call_that_brings_something_else_is_not_repeated() -> None:
    assert played([(*READ, "waiting")], [(*READ, "done")], [(*READ, "done")]) == ["c1"]


def test_reading_again_after_writing_is_not_repeated_and_going_in_circles_is() -> None:
    assert played([(*READ, "x")], [(*WRITE, "ok")], [(*READ, "x")]) == []
    assert played([(*READ, "x")], [(*WRITE, "ok")], [(*READ, "x")], [(*WRITE, "ok")], [(*READ, "x")]) == ["d1", "e1"]


def test_calls_of_one_answer_are_made_at_once() -> None:
    assert played([(*READ, "x"), (*READ, "x")]) == ["a2"]
    assert played([("look", "{}", "heads"), ("look", "{}", "tails")]) == []
    assert played([(*READ, "x"), (*WRITE, "ok")], [(*READ, "x"), (*WRITE, "ok")]) == ["b1", "b2"]


def test_the_last_call_is_repeated_though_nobody_saw_its_result() -> None:
    talk = Talk().turn([USER], said("", tool_call("1"))).turn([result("1")], said("", tool_call("2")))
    assert talk.found == [("a", "tool_succeeded/1"), ("b", "repeated_call/1")]


def test_what_somebody_asks_for_again_is_not_repeated() -> None:
    talk = Talk().turn([USER], said("", tool_call("1"))).turn([result("1")], said("It is 3."))
    talk.turn([USER], said("", tool_call("2"))).turn([result("2")], said("Still 3."))
    assert ("c", "repeated_call/1") not in talk.found


def test_another_conversation_of_the_rollout_does_not_matter() -> None:
    talk = Talk().turn([USER], said("", tool_call("1"))).turn([result("1")], said("It is 3."))
    talk.turn([USER], said("", tool_call("2")), parent=None, kept_messages=0)
    assert talk.found == [("a", "tool_succeeded/1")]


def test_branches_of_a_conversation_do_not_see_each_other() -> None:
    talk = Talk().turn([USER], said("", tool_call("1")))
    talk.turn([result("1")], said("", tool_call("2", "look", "{}")))
    talk.turn([result("1")], said("", tool_call("3", "look", "{}")), parent="a", kept_messages=2)
    assert [name for _, name in talk.found if name.startswith("repeated")] == []
