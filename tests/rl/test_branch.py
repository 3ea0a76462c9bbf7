"""Where rollouts are continued: evenly, or after the calls of which the model was least certain."""

from collections.abc import Sequence

import pytest
from smallepisodes import call

from leyden.config import Hyperparameters
from leyden.records import Call
from leyden.rl.branch import Branch, Point
from leyden.rl.branch.even import even
from leyden.rl.branch.uncertain import uncertain


def rollout(*surprises: float) -> tuple[Call, ...]:
    return tuple(
        Call(id=f"c{number}", completion_ids=(1, 2), logprobs=(-surprise - 0.1, -surprise + 0.1))
        for number, surprise in enumerate(surprises)
    )


def points(branch: Branch, own: Sequence[Call], others: Sequence[tuple[Call, ...]], most: int = 1) -> list[int]:
    named = Hyperparameters(branch_points=most)
    return [after for after in range(1, len(own)) if branch(Point(tuple(own[:after]), tuple(others)), named)]


@pytest.mark.parametrize(("most", "expected"), [(1, [4]), (3, [2, 4, 6]), (20, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_even_divides_what_the_others_are_long(most: int, expected: list[int]) -> None:
    others = [rollout(*[1.0] * 6), rollout(*[1.0] * 10)]
    assert points(even, rollout(*[1.0] * 10), others, most) == expected


def test_uncertain_takes_calls_as_surprising_as_the_most_surprising_of_the_others() -> None:
    others = [rollout(0.1, 0.9, 0.2), rollout(0.8, 0.3, 0.1)]
    own = rollout(0.2, 0.85, 0.5, 0.95, 0.1)
    assert points(uncertain, own, others) == [2, 4]  # 0.8 is the second of two
    assert points(uncertain, own, others, 2) == [1, 2, 3, 4]  # 0.2 is the fourth
    assert points(uncertain, own, others, 9) == [1, 2, 3, 4]


@pytest.mark.parametrize("branch", [even, uncertain])
def test_nothing_is_known_without_other_rollouts_or_logprobs(branch: Branch) -> None:
    assert points(branch, rollout(1.0, 1.0, 1.0), []) in ([], [1])
    assert points(uncertain, [Call(id="a"), Call(id="b")], [(call("c"),)]) == []
