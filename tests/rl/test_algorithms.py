"""Credit, advantage, aggregation and loss against cases worked out by hand."""

import pytest
import torch

from leyden.rl.advantage import call_weights
from leyden.rl.advantage.grpo import grpo
from leyden.rl.aggregation.rollout_mean import rollout_mean
from leyden.rl.choosing import Unknown, choose
from leyden.rl.credit import Earned
from leyden.rl.credit.identical import identical
from leyden.rl.loss import Clip
from leyden.rl.loss.ppo_clip import ppo_clip


def test_identical_gives_every_call_the_return() -> None:
    assert identical(Earned((0.5, 0.0, 0.25), 1.0, (True, False, True))) == (1.75, 1.75, 1.75)


def test_grpo_at_the_level_of_rollouts_is_one_value_a_rollout() -> None:
    values = [[1.0], [0.0, 0.0, 0.0], [0.0], [1.0, 1.0]]
    advantages = grpo(values, call_weights([1, 3, 1, 2], "rollout"))
    deviation = (4 * 0.25 / 3) ** 0.5
    assert advantages[0] == pytest.approx([0.5 / deviation])
    assert advantages[1] == pytest.approx([-0.5 / deviation] * 3)


def test_grpo_at_the_level_of_transitions_counts_calls() -> None:
    advantages = grpo([[1.0], [0.0, 0.0, 0.0]], call_weights([1, 3], "transition"))
    assert advantages[0] == pytest.approx([0.75 / 0.5])
    assert advantages[1] == pytest.approx([-0.25 / 0.5] * 3)


@pytest.mark.parametrize("values", [[[1.0]], [[0.3, 0.3], [0.3]], [[1e9], [1e9]]])
def test_a_group_of_one_or_without_variance_has_no_advantage(values: list[list[float]]) -> None:
    advantages = grpo(values, call_weights([len(row) for row in values], "rollout"))
    assert advantages == [[0.0] * len(row) for row in values]


def test_rollout_mean_weighs_rollouts_equally_and_sums_to_one() -> None:
    tokens = [[10], [5, 15], [], [1]]
    weights = rollout_mean(tokens)
    totals = [sum(n * w for n, w in zip(*pair, strict=True)) for pair in zip(tokens, weights, strict=True)]
    assert totals == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_ppo_stops_gaining_beyond_the_clip_range() -> None:
    proximal = torch.zeros(4)
    current = torch.tensor([0.0, 0.5, 0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, figures = ppo_clip(current, proximal, advantages, Clip(0.2, 0.28))
    assert loss.tolist() == pytest.approx([-1.0, -1.28, 1.6487212, 0.8])
    loss.sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-1.0, 0.0, 1.6487212, 0.0])
    assert figures["clipped"].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_an_algorithm_is_chosen_by_its_name_or_is_the_users() -> None:
    assert choose("advantage", "grpo") is grpo
    assert choose("credit", "statistics:fmean")([1, 3]) == 2
    with pytest.raises(Unknown, match=r"`algorithm.loss`: there is no 'ppo'; there are ppo_clip, or module:function"):
        choose("loss", "ppo")
    with pytest.raises(Unknown, match="nowhere"):
        choose("loss", "nowhere:at_all")
