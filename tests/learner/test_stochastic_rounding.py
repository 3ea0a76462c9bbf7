"""Rounding to bfloat16 keeps the mean of changes that are smaller than the step between two numbers."""

from itertools import pairwise

import torch

from leyden.learner.stochastic_rounding import round_to_bfloat16


def test_the_mean_of_small_changes_is_kept() -> None:
    torch.manual_seed(0)
    weights = torch.randn(512, 512).mul(0.02).bfloat16()
    for change in (1e-7, 1e-6, 1e-5, -1e-5, 1e-3):
        rounded = round_to_bfloat16(weights.float() + change, seed=3)
        assert rounded.dtype == torch.bfloat16
        moved = (rounded.float() - weights.float()).mean().item()
        assert abs(moved / change - 1) < 0.15, change


def test_what_bfloat16_holds_stays_and_nothing_moves_beyond_its_neighbours() -> None:
    torch.manual_seed(0)
    weights = torch.randn(64, 64).bfloat16()
    assert torch.equal(round_to_bfloat16(weights.float(), seed=3), weights)
    exact = torch.randn(64, 64)
    rounded = round_to_bfloat16(exact, seed=3).float()
    assert ((rounded - exact).abs() < exact.abs() * 2**-7).all()


def test_a_seed_gives_the_same_and_the_random_numbers_of_others_are_left_alone() -> None:
    values, state = torch.linspace(-1, 1, 999), torch.get_rng_state()
    first, again, other = (round_to_bfloat16(values, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_move_one_after_another_as_a_change_grows() -> None:
    weights = torch.rand(999).bfloat16().float()
    moved = [round_to_bfloat16(weights + step * 1e-4, seed=5) for step in range(20)]
    assert all((later >= earlier).all() for earlier, later in pairwise(moved))
