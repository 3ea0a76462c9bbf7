"""Errors are clustered by task, pass@k is unbiased, and evaluations of the same tasks are compared in pairs."""

from itertools import combinations
from math import sqrt
from statistics import fmean, stdev

import pytest

from leyden.estimates import compare, estimate, pass_at


def test_the_standard_error_is_that_between_tasks() -> None:
    # The sums of x - 1/2 are 1, -1 and 0 over three tasks of two rollouts: sqrt(3/2 x 2) / 6.
    found = estimate({"a": [1, 1], "b": [0, 0], "c": [1, 0]})
    assert found is not None
    assert (found.mean, found.rollouts, found.tasks) == (0.5, 6, 3)
    assert found.error == pytest.approx(sqrt(3) / 6)
    assert found.error > stdev([1, 1, 0, 0, 1, 0]) / sqrt(6)  # which takes the rollouts of a task as independent


def test_with_one_rollout_per_task_it_is_the_usual_one() -> None:
    rewards = [1.0, 0.0, 0.25, 1.0]
    found = estimate({str(task): [reward] for task, reward in enumerate(rewards)})
    assert found is not None and found.error == pytest.approx(stdev(rewards) / 2)


def test_repeating_every_rollout_makes_nothing_more_certain() -> None:
    once = estimate({"a": [1.0], "b": [0.0], "c": [0.0]})
    often = estimate({"a": [1.0] * 50, "b": [0.0] * 50, "c": [0.0] * 50})
    assert once is not None and often is not None
    assert often.error == pytest.approx(once.error)


def test_too_little_is_no_estimate() -> None:
    assert estimate({}) is None and estimate({"a": []}) is None
    alone = estimate({"a": [1.0, 0.0], "b": []})
    assert alone is not None and (alone.error, alone.tasks) == (None, 1)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_share_of_all_choices_of_k_rollouts_with_a_success(k: int) -> None:
    rewards = {"a": [1.0, 0.0, 0.0, 1.0], "b": [0.5, 0.0, 0.0, 0.0], "c": [1.0]}
    expected = [
        fmean(any(reward >= 1.0 for reward in some) for some in combinations(rewards[task], k))
        for task in rewards
        if len(rewards[task]) >= k
    ]
    assert pass_at(rewards, k, success=1.0) == pytest.approx(fmean(expected))
    assert pass_at(rewards, 5, success=1.0) is None


def test_pairs_remove_what_tasks_have_in_common() -> None:
    before = {"easy": [0.9, 1.0], "hard": [0.0, 0.1], "gone": [1.0]}
    after = {"easy": [1.0], "hard": [0.2], "new": [0.0], "failed": []}
    found = compare(before, after)
    assert found is not None
    assert (found.first, found.second) == (pytest.approx(0.5), pytest.approx(0.6))
    assert found.difference == pytest.approx(0.1)
    assert found.error == pytest.approx(stdev([0.05, 0.15]) / sqrt(2))  # far less than the 0.45 of either mean
    assert (found.tasks, found.unmatched) == (2, 2)
    assert compare({"a": [1.0]}, {"b": [1.0]}) is None
