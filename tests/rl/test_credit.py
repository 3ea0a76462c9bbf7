"""Credits against cases worked out by hand, and what must hold for any rewards."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.config import Hyperparameters
from leyden.rl.credit import Credit, RolloutRewards
from leyden.rl.credit.discounted import discounted
from leyden.rl.credit.gae import gae
from leyden.rl.credit.identical import identical
from leyden.rl.credit.last_call import last_call
from leyden.rl.credit.stepwise import stepwise

ALL = RolloutRewards((0.5, 0.0, 0.25), 1.0, (True, True, True), (0.3, 0.4, 0.6))
REWARDS = st.floats(-10, 10)
ROLLOUTS = st.lists(st.tuples(REWARDS, st.booleans(), REWARDS), min_size=1, max_size=6)


def earned(rollout: list[tuple[float, bool, float]], final: float) -> RolloutRewards:
    steps, selected, critic = zip(*rollout, strict=True)
    return RolloutRewards(steps, final, selected, critic)


def with_selected(*selected: bool) -> RolloutRewards:
    return RolloutRewards(ALL.steps, ALL.final, selected, ALL.critic)


def test_identical_gives_every_call_the_return() -> None:
    assert identical(ALL, Hyperparameters()) == [1.75, 1.75, 1.75]


def test_discounted_is_reward_to_go_and_every_call_is_time() -> None:
    assert discounted(ALL, Hyperparameters(gamma=0.5)) == [0.8125, 0.625, 1.25]
    assert discounted(with_selected(True, False, True), Hyperparameters(gamma=0.5)) == [0.8125, 0.625, 1.25]
    assert discounted(ALL, Hyperparameters()) == [1.75, 1.25, 1.25]


def test_last_call_gives_the_return_to_the_last_that_is_trained_on() -> None:
    assert last_call(ALL, Hyperparameters()) == [None, None, 1.75]
    assert last_call(with_selected(True, True, False), Hyperparameters()) == [None, 1.75, None]
    assert last_call(with_selected(False, False, False), Hyperparameters()) == [None, None, None]


@pytest.mark.parametrize(("spread", "first", "last"), [("all", 1.5, 1.25), ("last", 0.5, 1.25), ("even", 1.0, 0.75)])
def test_stepwise_leaves_rewards_where_they_happened(
    spread: Literal["all", "last", "even"], first: float, last: float
) -> None:
    values = stepwise(with_selected(True, False, True), Hyperparameters(spread=spread))
    assert (values[0], values[2]) == (first, last)


def test_stepwise_gives_the_end_to_the_last_call_that_is_trained_on() -> None:
    assert stepwise(with_selected(True, True, False), Hyperparameters(spread="last"))[:2] == [0.5, 1.0]


def test_gae_mixes_what_was_earned_with_what_the_critic_saw_coming() -> None:
    # by hand: 1.25; 0 + 0.5 (0.2 x 0.6 + 0.8 x 1.25); 0.5 + 0.5 (0.2 x 0.4 + 0.8 x 0.56)
    assert gae(ALL, Hyperparameters(gamma=0.5, lam=0.8)) == pytest.approx([0.764, 0.56, 1.25])


def test_gae_less_the_critic_is_the_discounted_sum_of_surprises() -> None:
    # surprises r + gamma V' - V: 0.4, -0.1, 0.65; each earlier one adds gamma lam = 0.4 times the later
    values = gae(ALL, Hyperparameters(gamma=0.5, lam=0.8))
    advantages = [value - critic for value, critic in zip(values, ALL.critic, strict=True) if value is not None]
    assert advantages == pytest.approx([0.4 + 0.4 * 0.16, -0.1 + 0.4 * 0.65, 0.65])


def test_gae_passes_time_and_rewards_through_calls_that_are_not_selected() -> None:
    hyperparameters = Hyperparameters(gamma=0.5, lam=0.8)
    assert gae(with_selected(True, False, True), hyperparameters) == [pytest.approx(0.78), None, 1.25]
    assert gae(with_selected(True, True, False), hyperparameters) == [pytest.approx(0.79), pytest.approx(0.625), None]
    assert gae(with_selected(False, True, True), hyperparameters) == [None, pytest.approx(0.56), 1.25]


def test_gae_without_a_critic_says_so() -> None:
    with pytest.raises(ValueError, match="critic's value for each of 1 calls, got 0"):
        gae(RolloutRewards((0.0,), 1.0, (True,)), Hyperparameters())


@pytest.mark.parametrize("credit", [identical, discounted, last_call, stepwise, gae])
def test_a_rollout_without_calls_has_no_values(credit: Credit) -> None:
    assert list(credit(RolloutRewards((), 1.0, ()), Hyperparameters())) == []


@given(ROLLOUTS, REWARDS, st.floats(0, 1))
def test_gae_with_lambda_one_is_discounted_whatever_the_critic_says(
    rollout: list[tuple[float, bool, float]], final: float, gamma: float
) -> None:
    given_ = earned(rollout, final)
    expected = discounted(given_, Hyperparameters(gamma=gamma))
    for value, same, selected in zip(
        gae(given_, Hyperparameters(gamma=gamma, lam=1.0)), expected, given_.selected, strict=True
    ):
        assert (value is None) is not selected
        assert value is None or value == pytest.approx(same)


@given(ROLLOUTS, REWARDS)
def test_even_parts_add_up_to_the_return_of_selected_calls(
    rollout: list[tuple[float, bool, float]], final: float
) -> None:
    given_ = earned(rollout, final)
    chosen = [
        value for value, ok in zip(stepwise(given_, Hyperparameters(spread="even")), given_.selected, strict=True) if ok
    ]
    if chosen:
        steps = sum(step for step, ok in zip(given_.steps, given_.selected, strict=True) if ok)
        assert sum(chosen) == pytest.approx(steps + final, abs=1e-9)
