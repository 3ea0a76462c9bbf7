"""The answers to calls outside rollouts: the latest are kept, within a number and a size."""

import pytest

from leyden.records import Call
from leyden.server.gateway.calls.recorder import MAX_BYTES, MAX_CALLS, DirectAnswers


@pytest.mark.parametrize(("size", "kept"), [(1, MAX_CALLS), (MAX_BYTES // 10, 10), (MAX_BYTES, 1)])
def test_the_latest_are_kept_within_the_limits(size: int, kept: int) -> None:
    answers = DirectAnswers()
    for number in range(kept + 5):
        answers.add("key", [Call(f"call-{number}")], size)
    assert [number for number in range(kept + 5) if answers.get("key", f"call-{number}")] == list(range(5, kept + 5))


def test_a_deleted_one_makes_room_and_one_of_another_key_is_not_found() -> None:
    answers = DirectAnswers()
    answers.add("key", [Call("a")], MAX_BYTES // 2)
    answers.add("key", [Call("b")], MAX_BYTES // 2)
    answers.delete("key", "b")
    answers.delete("key", "b")
    answers.add("key", [Call("c")], MAX_BYTES // 2)
    assert answers.get("key", "a") == Call("a") and answers.get("key", "c") == Call("c")
    assert answers.get("other", "a") is None


def test_a_request_that_is_larger_than_the_limit_is_not_kept() -> None:
    answers = DirectAnswers()
    answers.add("key", [Call("a")], MAX_BYTES + 1)
    assert answers.get("key", "a") is None
