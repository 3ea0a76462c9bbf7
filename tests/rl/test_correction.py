"""Corrections against cases worked out by hand, at each level."""

import pytest
import torch

from leyden.config import Hyperparameters
from leyden.rl.correction import ratios
from leyden.rl.correction.masked import masked
from leyden.rl.correction.truncated import truncated

RATIO = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0])


def test_truncated_counts_no_token_more_than_the_bound() -> None:
    assert truncated(RATIO, Hyperparameters()).tolist() == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert truncated(RATIO, Hyperparameters(correction_high=float("inf"))).tolist() == RATIO.tolist()


def test_masked_leaves_out_what_the_policies_disagree_on() -> None:
    assert masked(RATIO, Hyperparameters()).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]


def test_a_ratio_is_of_a_token_or_of_all_the_tokens_of_a_unit() -> None:
    gap = torch.tensor([0.1, 0.2, -0.3])
    assert ratios(gap).tolist() == pytest.approx([1.1051709, 1.2214028, 0.7408182])
    assert ratios(gap, torch.tensor([0, 0, 1])).tolist() == pytest.approx([1.3498588, 1.3498588, 0.7408182])
    assert ratios(gap, torch.tensor([4, 4, 4])).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_a_geometric_ratio_does_not_grow_with_the_tokens_of_a_unit() -> None:
    gap = torch.tensor([0.1, 0.3, -0.3])
    unit = torch.tensor([0, 0, 1])
    assert ratios(gap, unit, geometric=True).tolist() == pytest.approx([1.2214028, 1.2214028, 0.7408182])
    assert ratios(gap, geometric=True).tolist() == ratios(gap).tolist()
    long = torch.full((1000,), 0.01)  # e^10 as a product
    bounds = Hyperparameters(correction_low=0.98, correction_high=1.02)
    whole = torch.zeros(1000, dtype=torch.int64)
    assert not masked(ratios(long, whole), bounds).any()
    assert masked(ratios(long, whole, geometric=True), bounds).tolist() == pytest.approx([1.0100502] * 1000)
    assert not masked(ratios(3 * long, whole, geometric=True), bounds).any()


def test_no_gradient_goes_through_a_correction() -> None:
    assert not ratios(torch.tensor([0.1], requires_grad=True)).requires_grad


def test_policies_that_are_worlds_apart_have_finite_weights() -> None:
    far = ratios(torch.tensor([300.0, -300.0]))
    assert torch.isfinite(far**2).all()
    assert truncated(far, Hyperparameters()).tolist() == pytest.approx([2.0, 0.0], abs=1e-8)
    assert masked(far, Hyperparameters()).tolist() == [0.0, 0.0]
