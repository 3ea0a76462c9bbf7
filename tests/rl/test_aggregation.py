"""Weights of tokens against cases worked out by hand; what is divided differently weighs the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.config import Hyperparameters
from leyden.rl.aggregation import Aggregation
from leyden.rl.aggregation.call_mean import call_mean
from leyden.rl.aggregation.constant import constant
from leyden.rl.aggregation.rollout_mean import rollout_mean
from leyden.rl.aggregation.token_mean import token_mean

LENGTHS = [[2, 6], [4], [], [0]]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (rollout_mean, [[1 / 16, 1 / 16], [1 / 8], [], [0.0]]),
        (call_mean, [[1 / 6, 1 / 18], [1 / 12], [], [0.0]]),
        (token_mean, [[1 / 12, 1 / 12], [1 / 12], [], [1 / 12]]),
        (constant, [[1 / 20, 1 / 20], [1 / 20], [], [1 / 20]]),
    ],
)
def test_weights_by_hand(aggregation: Aggregation, expected: list[list[float]]) -> None:
    found = aggregation(LENGTHS, Hyperparameters(length=10))
    assert [pytest.approx(calls) for calls in expected] == found


@given(st.lists(st.lists(st.integers(0, 50), max_size=4), max_size=5))
def test_means_add_up_to_one(lengths: list[list[int]]) -> None:
    tokens = sum(map(sum, lengths))
    for aggregation in (rollout_mean, call_mean, token_mean):
        weights = aggregation(lengths, Hyperparameters())
        summed = sum(n * w for pair in zip(lengths, weights, strict=True) for n, w in zip(*pair, strict=True))
        assert summed == pytest.approx(1.0 if tokens else 0.0)
