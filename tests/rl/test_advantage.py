"""Advantages against cases worked out by hand, what must hold for any update, and who has nobody to compare with."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from randomness import examples

from leyden.config import Hyperparameters
from leyden.rl.advantage import Advantage, CallBatch, Floats, GroupCounts, count_groups, total, weights
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.advantage.gigpo import gigpo
from leyden.rl.advantage.grpo import grpo
from leyden.rl.advantage.ppo import ppo
from leyden.rl.advantage.reinforce_pp import reinforce_pp
from leyden.rl.advantage.reinforce_pp_baseline import reinforce_pp_baseline
from leyden.rl.advantage.rloo import rloo

ROOT = 0.5**0.5
GROUP_RELATIVE = [grpo, dr_grpo, rloo, reinforce_pp_baseline]
EVERY = [*GROUP_RELATIVE, reinforce_pp, gigpo, ppo]


def calls(update: Sequence[Sequence[Sequence[float]]], level: str = "rollout", **others: Sequence[float]) -> CallBatch:
    """Values by group, rollout and call; states all different, one kind, returns the sum, no critic."""
    flat = [
        (value, g, (g, r), sum(rollout))
        for g, group in enumerate(update)
        for r, rollout in enumerate(group)
        for value in rollout
    ]
    names = {name: index for index, name in enumerate(dict.fromkeys(name for _, _, name, _ in flat))}
    rollout = np.array([names[name] for _, _, name, _ in flat], dtype=np.int64)
    made = CallBatch(
        value=np.array([value for value, *_ in flat]),
        weight=weights(rollout, level),
        group=np.array([group for _, group, _, _ in flat], dtype=np.int64),
        rollout=rollout,
        kind=np.zeros(len(flat), dtype=np.int64),
        returns=np.array([returns for *_, returns in flat]),
        baseline=np.zeros(len(flat)),
        state=np.arange(len(flat), dtype=np.int64),
    )
    ints = {"kind", "state", "situation"}
    return replace(made, **{name: np.array(of, np.int64 if name in ints else None) for name, of in others.items()})


def told(advantage: Advantage, of: CallBatch, hyperparameters: Hyperparameters | None = None) -> list[float]:
    return advantage(of, hyperparameters or Hyperparameters()).tolist()


# By hand, rollouts (1, 3) and (5): the mean is (2 + 5) / 2, the variance ((6.25 + 0.25) / 2 + 2.25) / (2 - 1) = 5.5.
TWO = calls([[[1.0, 3.0], [5.0]]])


def test_grpo_at_the_level_of_rollouts() -> None:
    assert told(grpo, TWO) == pytest.approx([-1.0660035818, -0.2132007164, 0.6396021491])


def test_grpo_at_the_level_of_transitions_counts_calls() -> None:
    assert told(grpo, calls([[[1.0, 3.0], [5.0]]], "transition")) == pytest.approx([-1.0, 0.0, 1.0])


def test_grpo_with_one_value_a_rollout_does_not_care_how_many_calls_it_had() -> None:
    # 1, 0, 0, 1: the mean is 0.5, the deviation sqrt(4 x 0.25 / 3)
    assert told(grpo, calls([[[1.0], [0.0, 0.0, 0.0], [0.0], [1.0, 1.0]]])) == pytest.approx(
        [0.8660254038, *[-0.8660254038] * 4, *[0.8660254038] * 2]
    )


def test_dr_grpo_is_the_distance_to_the_mean() -> None:
    assert told(dr_grpo, TWO) == pytest.approx([-2.5, -0.5, 1.5])


def test_rloo_leaves_out_the_rollout_itself() -> None:
    assert told(rloo, TWO) == pytest.approx([-4.0, -2.0, 3.0])
    three = [[[1.0, 3.0], [5.0], [6.0]]]
    # the last against (2 + 5) / 2 where rollouts count, against (1 + 3 + 5) / 3 where calls do
    assert told(rloo, calls(three))[3] == pytest.approx(2.5)
    assert told(rloo, calls(three, "transition"))[3] == pytest.approx(3.0)


def test_a_value_is_compared_with_those_in_its_situation() -> None:
    alone = calls([[[1.0, 6.0], [3.0, 2.0, 7.0]]], situation=[0, 1, 0, 1, 2])
    # no other group: situations have the means 2 and 4, and the third is compared with the mean of 3.5 and 4 as two of
    # three: 7 - (7 + 2 x 3.75) / 3
    assert told(dr_grpo, alone) == pytest.approx([-1.0, 2.0, 1.0, -2.0, 6.5 / 3])
    assert told(rloo, alone) == pytest.approx([-2.0, 4.0, 2.0, -4.0, 3.5])
    # two groups: in the other one, second calls are 4 above the mean of two rollouts: 2 x 2 / (2 + 1) above and below
    update = calls([[[1.0, 6.0], [3.0, 2.0]], [[0.0, 4.0], [0.0, 4.0]]], situation=[0, 1] * 4)
    guess = np.array([3 - 4 / 3, 3 + 4 / 3] * 2)  # with the level of its own group, 3, counted as 2 x 2 / (2 + 1)
    expected = (np.array([4.0, 8.0] * 2) + 4 / 3 * guess) / (2 + 4 / 3)
    assert told(dr_grpo, update)[:4] == pytest.approx(np.array([1.0, 6.0, 3.0, 2.0]) - expected)
    assert told(dr_grpo, update)[4:] == [0.0] * 4  # in no situation do values differ
    assert count_groups(update) == GroupCounts(alone=0, flat=1)


@pytest.mark.parametrize("advantage", [*GROUP_RELATIVE, reinforce_pp])
def test_what_all_calls_in_a_situation_have_alike_changes_nothing_in_a_group(advantage: Advantage) -> None:
    update = [[1.0, 6.0], [3.0, 2.0], [0.0, 2.5]]
    plain = advantage(calls([update], situation=[0, 1] * 3), Hyperparameters())
    shifted = [[one, other + 40] for one, other in update]
    assert advantage(calls([shifted], situation=[0, 1] * 3), Hyperparameters()) == pytest.approx(plain)
    assert advantage(calls([shifted]), Hyperparameters()) != pytest.approx(plain)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=4), min_size=1, max_size=4))
def test_one_situation_for_all_is_the_textbook(update: list[list[float]]) -> None:
    plain = calls([[[value] for value in group] for group in update])
    alike = replace(plain, situation=np.zeros(len(plain.value), np.int64))
    for advantage in (*GROUP_RELATIVE, reinforce_pp):
        assert told(advantage, alike) == pytest.approx(told(advantage, plain), abs=1e-12)


def test_reinforce_pp_compares_with_the_whole_update() -> None:
    # 0, 2, 4, 6: the mean is 3, the deviation sqrt(20 / 3)
    assert told(reinforce_pp, calls([[[0.0], [2.0]], [[4.0], [6.0]]])) == pytest.approx(
        [-1.1618950039, -0.3872983346, 0.3872983346, 1.1618950039]
    )


def test_reinforce_pp_compares_groups_of_one() -> None:
    assert told(reinforce_pp, calls([[[0.0]], [[2.0]]])) == pytest.approx([-ROOT, ROOT])


def test_reinforce_pp_baseline_takes_the_mean_of_the_group_and_the_deviation_of_the_update() -> None:
    # -1, 1, -3, 3: the deviation is sqrt(20 / 3)
    assert told(reinforce_pp_baseline, calls([[[0.0], [2.0]], [[4.0], [10.0]]])) == pytest.approx(
        [-0.3872983346, 0.3872983346, -1.1618950039, 1.1618950039]
    )


@pytest.mark.parametrize("advantage", [reinforce_pp, reinforce_pp_baseline, ppo])
def test_kinds_of_tasks_are_normalised_apart(advantage: Advantage) -> None:
    update = calls([[[0.0], [2.0]], [[0.0], [600.0]]], kind=[0, 0, 1, 1])
    assert told(advantage, update) == pytest.approx([-ROOT, ROOT, -ROOT, ROOT])


def test_gigpo_adds_the_step_level_to_the_episode_level() -> None:
    update = calls([[[0.9, 1.0], [0.3, 0.0]]], returns=[1, 1, 0, 0], state=[0, 1, 0, 2])
    # episodes 1 and 0, and values 0.9 and 0.3 in state 0: two different numbers are always 1 / sqrt 2 from their mean
    assert told(gigpo, update, Hyperparameters(step_weight=2.0)) == pytest.approx([3 * ROOT, ROOT, -3 * ROOT, -ROOT])


def test_gigpo_counts_each_rollout_once_among_episodes_and_each_call_once_in_a_state() -> None:
    update = calls([[[3.0, 1.0, 7.0], [2.0]]], returns=[1, 1, 1, 0], state=[0, 0, 1, 0])
    # state 0 holds 3, 1 and 2: mean 2, deviation 1
    expected = [ROOT + 1.0, ROOT - 1.0, ROOT, -ROOT]
    assert told(gigpo, update) == pytest.approx(expected)
    assert told(gigpo, replace(update, weight=np.ones(4))) == pytest.approx(expected)


def test_ppo_is_what_the_critic_had_not_expected() -> None:
    update = calls([[[1.0], [2.0], [4.0]]], baseline=[0, 2, 1])
    # 1, 0, 3: the mean is 4/3, the deviation sqrt(7 / 3)
    assert told(ppo, update) == pytest.approx([-0.2182178902, -0.8728715609, 1.0910894512])


@pytest.mark.parametrize("level", ["rollout", "transition"])
@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
def test_a_group_of_one_rollout_has_no_other_to_compare_with(advantage: Advantage, level: str) -> None:
    update = calls([[[1.0, 2.0, 7.0]], [[1.0], [2.0]]], level)
    assert told(advantage, update)[:3] == [0.0, 0.0, 0.0]
    assert np.all(advantage(update, Hyperparameters())[3:] != 0)


@pytest.mark.parametrize(
    "group",
    [
        [[0.3], [0.1 + 0.2]],
        [[0.3, 0.1 + 0.2], [0.3]],
        [[0.0], [0.1 + 0.2 - 0.3]],
        [[1e9], [1e9]],
        [[float(np.float32(0.6) + np.float32(0.8))], [float(np.float32(1.4))]],
        [[1000 * float(np.float32(0.6) + np.float32(0.8))], [1000 * float(np.float32(1.4))]],
    ],
)
@pytest.mark.parametrize("advantage", GROUP_RELATIVE)
def test_noise_is_no_difference(advantage: Advantage, group: list[list[float]]) -> None:
    assert told(advantage, calls([group])) == [0.0] * sum(map(len, group))


@pytest.mark.parametrize("advantage", [reinforce_pp, ppo, gigpo])
def test_an_update_without_differences_has_no_advantages(advantage: Advantage) -> None:
    update = calls([[[0.3], [0.1 + 0.2]], [[0.3], [0.3]]], state=[0, 0, 1, 1])
    assert told(advantage, update) == [0.0] * 4


def test_small_differences_of_large_values_count() -> None:
    assert told(grpo, calls([[[1e6], [1e6 + 1]]])) == pytest.approx([-ROOT, ROOT])


@pytest.mark.parametrize("size", [2, 8, 16, 64])
def test_the_floor_of_the_deviation_leaves_binary_rewards_of_groups_up_to_64_as_they_are(size: int) -> None:
    for successes in range(1, size):
        update = calls([[[float(rollout < successes)] for rollout in range(size)]])
        # one success among n: the variance is (1 / n) (1 - 1 / n) n / (n - 1) = 1 / n, the smallest there is
        assert update.deviation(update.value, update.group).min() >= size**-0.5 - 1e-12
        for advantage in (grpo, reinforce_pp, reinforce_pp_baseline, gigpo, ppo):
            without = advantage(update, Hyperparameters(deviation_floor=0.0))
            assert advantage(update, Hyperparameters()) == pytest.approx(without, rel=1e-9)


@pytest.mark.parametrize("advantage", [grpo, reinforce_pp, reinforce_pp_baseline, gigpo, ppo])
def test_small_differences_give_small_advantages(advantage: Advantage) -> None:
    for scale in (0.1, 0.01, 0.001):
        update = calls([[[0.0], [0.0], [0.0], [-scale]]])
        assert told(advantage, update) == pytest.approx([2 * scale, 2 * scale, 2 * scale, -6 * scale])
    assert told(advantage, calls([[[0.0], [0.0], [0.0], [-1.0]]])) == pytest.approx([0.5, 0.5, 0.5, -1.5])


@pytest.mark.parametrize("length", [6, 49, 98])
def test_the_weights_of_a_long_rollout_add_up_to_no_more_than_one(length: int) -> None:
    alone = calls([[list(range(length))]])
    assert not np.any(alone.deviation(alone.value, alone.group))


@pytest.mark.parametrize("advantage", EVERY)
def test_an_update_without_calls_has_no_advantages(advantage: Advantage) -> None:
    assert told(advantage, calls([])) == []


def test_groups_that_say_nothing_are_counted_by_why() -> None:
    update = calls([[[1.0], [0.0]], [[1.0, 2.0]], [[0.3], [0.1 + 0.2]], [[0.0, 0.0], [0.0]]])
    assert count_groups(update) == GroupCounts(alone=1, flat=2)
    assert count_groups(calls([])) == GroupCounts(alone=0, flat=0)


VALUES = st.integers(-20, 20).map(lambda value: value / 4)
UPDATES = st.lists(st.lists(st.lists(VALUES, min_size=1, max_size=4), min_size=1, max_size=4), min_size=1, max_size=4)
LEVELS = st.sampled_from(["rollout", "transition"])


@settings(deadline=None, max_examples=examples(100))
@given(UPDATES, LEVELS, st.lists(st.integers(-50, 50), min_size=4, max_size=4))
def test_what_all_rollouts_of_a_group_have_alike_changes_nothing(
    update: list[list[list[float]]], level: str, shifts: list[int]
) -> None:
    before = calls(update, level)
    after = replace(before, value=before.value + np.array(shifts)[before.group])
    for advantage in GROUP_RELATIVE:
        assert advantage(after, Hyperparameters()) == pytest.approx(advantage(before, Hyperparameters()), abs=1e-9)


@settings(deadline=None, max_examples=examples(100))
@given(UPDATES, LEVELS, st.floats(0.1, 100))
def test_the_scale_of_rewards_changes_only_what_is_not_normalised(
    update: list[list[list[float]]], level: str, scale: float
) -> None:
    before = calls(update, level)
    after = replace(before, value=scale * before.value, returns=scale * before.returns)
    hyperparameters = Hyperparameters(deviation_floor=0.0)
    for advantage in EVERY:
        factor = scale if advantage in (dr_grpo, rloo) else 1.0
        assert advantage(after, hyperparameters) == pytest.approx(factor * advantage(before, hyperparameters), abs=1e-7)


@settings(deadline=None, max_examples=examples(100))
@given(UPDATES, LEVELS)
def test_advantages_of_a_group_balance(update: list[list[list[float]]], level: str) -> None:
    made = calls(update, level)
    for advantage in GROUP_RELATIVE:
        if advantage is not rloo or level == "rollout":
            assert total(made.weight * advantage(made, Hyperparameters()), made.group) == pytest.approx(0, abs=1e-9)
    assert (made.weight * reinforce_pp(made, Hyperparameters())).sum() == pytest.approx(0, abs=1e-9)


@settings(deadline=None, max_examples=examples(100))
@given(UPDATES, LEVELS, st.randoms(use_true_random=False))
def test_the_order_of_calls_and_the_numbers_of_rollouts_mean_nothing(
    update: list[list[list[float]]], level: str, random: object
) -> None:
    made = calls(update, level)
    made = replace(made, state=made.group)
    order = list(range(len(made.value)))
    random.shuffle(order)
    fields = {name: field[order] for name in CallBatch.__struct_fields__ if (field := getattr(made, name)) is not None}
    moved = CallBatch(**fields)
    moved = replace(moved, group=7 - moved.group, rollout=100 - 3 * moved.rollout, state=-moved.state)
    for advantage in EVERY:
        assert advantage(moved, Hyperparameters()) == pytest.approx(advantage(made, Hyperparameters())[order], abs=1e-9)


@settings(deadline=None, max_examples=examples(100))
@given(UPDATES, LEVELS)
def test_groups_do_not_touch_each_other(update: list[list[list[float]]], level: str) -> None:
    for advantage in (grpo, dr_grpo, rloo, gigpo):
        together = advantage(calls(update, level), Hyperparameters())
        apart: list[Floats] = [advantage(calls([group], level), Hyperparameters()) for group in update]
        assert together == pytest.approx(np.concatenate(apart), abs=1e-9)


@settings(deadline=None, max_examples=examples(100))
@given(UPDATES, LEVELS)
def test_advantages_are_numbers(update: list[list[list[float]]], level: str) -> None:
    for advantage in EVERY:
        assert np.all(np.isfinite(advantage(calls(update, level), Hyperparameters())))
