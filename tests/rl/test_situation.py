"""Calls of different rollouts are in the same situation if role, conversation and turn are the same."""

from smallepisodes import call, episode

from leyden.records import Call
from leyden.rl.situation import Situation, situations

QUESTION = {"role": "user", "content": "?"}


def asked(name: str, role: str | None = None) -> Call:
    return call(name, messages=(QUESTION,), role=role)


def continued(name: str, parent: str, kept: int, role: str | None = None) -> Call:
    return call(name, messages=(QUESTION,), parent=parent, kept_messages=kept, role=role)


def found(*calls: Call) -> list[str]:
    return [str(one) for one in situations(episode(0, 1.0, calls))]


def test_turns_are_counted_in_their_conversation() -> None:
    assert found(asked("a"), continued("b", "a", 2), continued("c", "b", 4)) == ["turn 0", "turn 1", "turn 2"]


def test_conversations_are_counted_by_their_role_and_may_alternate() -> None:
    calls = [
        asked("plan", "planner"),
        asked("one", "search"),
        asked("two", "search"),
        continued("more", "one", 2, "search"),
        continued("again", "plan", 2, "planner"),
    ]
    assert [(one.role, one.conversation, one.turn) for one in situations(episode(0, 1.0, calls))] == [
        ("planner", 0, 0),
        ("search", 0, 0),
        ("search", 1, 0),
        ("search", 0, 1),
        ("planner", 0, 1),
    ]


def test_an_edited_history_and_a_prompt_that_only_begins_alike_are_new_conversations() -> None:
    assert found(asked("a"), continued("b", "a", 1)) == ["turn 0", "conversation 1, turn 0"]
    assert found(call("a"), call("b")) == ["turn 0", "conversation 1, turn 0"]


def test_further_choices_and_repeated_requests_are_in_the_situation_of_the_first() -> None:
    again = Call(id="b", parent="a", kept_messages=1, kept_ids=2, completion_ids=(1,), logprobs=(-1.0,), choice=1)
    assert situations(episode(0, 1.0, [asked("a"), again])) == [Situation(None, 0, 0)] * 2
