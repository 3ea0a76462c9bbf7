"""Two calls are in the same state where their keys are equal."""

from typing import Any

import pytest

from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Attempt, Call, Purpose, Rollout, State, Task
from leyden.rl.registry import UnknownAlgorithm, load
from leyden.rl.state import number_classes, shared_fraction
from leyden.rl.state.messages import messages
from leyden.rl.state.prompt import prompt

ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which room?"})


def answer(id: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "function": {"name": "look"}}]}


def looked(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def episode(*calls: Call) -> Episode:
    rollout = Rollout("g.0", "r", "g", "t", 0, Purpose.TRAIN, State.FINISHED, 1, 3, 0.0)
    attempt = Attempt("g.0.1", "r", "g.0", 1, "w", None, 0.0, 9.0, 1.0, Outcome(Ending.SUCCEEDED))
    return Episode(rollout, attempt, Task("t", {}), calls)


def two_turns(
    id: str, seen: str, role: str | None = None, prompt_ids: tuple[int, ...] = (1, 2)
) -> tuple[Episode, Call]:
    first = Call("a", messages=ASKED, response=answer(id), prompt_ids=prompt_ids, completion_ids=(7,), role=role)
    new = (looked(id, seen),)
    second = Call("b", parent="a", kept_messages=3, messages=new, kept_ids=3, prompt_ids=(8,), role=role)
    return episode(first, second), second


def test_rollouts_meet_where_the_same_has_come_in_since_the_model_spoke() -> None:
    one, other = two_turns("call_x", "a door", prompt_ids=(1, 2)), two_turns("call_y", "a door", prompt_ids=(3, 4))
    assert messages(*one) == messages(*other)
    assert messages(*one) != messages(*two_turns("call_x", "a wall"))
    assert messages(*one) != messages(one[0], one[0].calls[0])


def test_the_beginning_of_a_task_is_its_own_state() -> None:
    one, other = (two_turns(id, "a door")[0] for id in ("x", "y"))
    assert messages(one, one.calls[0]) == messages(other, other.calls[0])


def test_another_role_is_in_another_state() -> None:
    assert messages(*two_turns("x", "a door", "writer")) != messages(*two_turns("x", "a door", "checker"))


def test_prompt_wants_the_same_tokens_all_the_way() -> None:
    assert prompt(*two_turns("x", "a door")) == (1, 2, 7, 8)
    assert prompt(*two_turns("x", "a door")) != prompt(*two_turns("x", "a door", prompt_ids=(3, 4)))


def test_a_key_is_chosen_by_its_name() -> None:
    assert load("state", "messages") is messages
    assert load("state", "prompt") is prompt
    with pytest.raises(
        UnknownAlgorithm, match=r"`algorithm\.state`: there is no 'board'; there are messages, prompt, or module"
    ):
        load("state", "board")


def test_equal_keys_have_equal_numbers_within_a_group_only() -> None:
    assert number_classes([0, 0, 0, 1], ["a", "b", "a", "a"]).tolist() == [0, 1, 0, 2]


def test_the_share_of_calls_that_have_company_in_their_state() -> None:
    assert shared_fraction(number_classes([0, 0, 0, 1], ["a", "b", "a", "a"])) == 0.5
    assert shared_fraction(number_classes([], [])) == 0.0
