"""Losses and their gradients against cases worked out by hand."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from leyden.config import Hyperparameters
from leyden.learner.objective import value_loss
from leyden.rl.loss import Loss, TokenBatch
from leyden.rl.loss.cispo import cispo
from leyden.rl.loss.gspo import gspo
from leyden.rl.loss.ppo_clip import ppo_clip
from leyden.rl.loss.reinforce import reinforce


def tokens(
    current: Sequence[float], proximal: Sequence[float], advantages: Sequence[float], call: Sequence[int] = ()
) -> TokenBatch:
    return TokenBatch(
        current=torch.tensor(current, requires_grad=True),
        proximal=torch.tensor(proximal),
        advantages=torch.tensor(advantages),
        call=torch.tensor(call or range(len(current))),
    )


def told(
    loss: Loss, of: TokenBatch, hyperparameters: Hyperparameters | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The loss of each token, the gradient of their sum, the metrics."""
    losses, metrics = loss(of, hyperparameters or Hyperparameters())
    losses.sum().backward()
    assert of.current.grad is not None
    return losses.tolist(), of.current.grad.tolist(), metrics


def test_reinforce_is_the_policy_gradient() -> None:
    losses, gradient, _ = told(reinforce, tokens([-0.5, -2.0], [0.0, 0.0], [2.0, -1.0]))
    assert losses == [1.0, -2.0]
    assert gradient == [-2.0, 1.0]


def test_ppo_stops_gaining_beyond_the_clip_range() -> None:
    given = tokens([0.0, 0.5, 0.5, -0.5], [0.0] * 4, [1.0, 1.0, -1.0, -1.0])
    losses, gradient, metrics = told(ppo_clip, given)
    assert losses == pytest.approx([-1.0, -1.28, 1.6487212, 0.8])
    assert gradient == pytest.approx([-1.0, 0.0, 1.6487212, 0.0])
    assert metrics["ratio"].tolist() == pytest.approx([1.0, 1.6487212, 1.6487212, 0.6065307])
    assert metrics["clipped_low"].tolist() == [False, False, False, True]
    assert metrics["clipped_high"].tolist() == [False, True, False, False]


def test_the_dual_clip_bounds_how_hard_a_bad_token_is_pushed_down() -> None:
    given = tokens([1.5, 0.5, 1.5], [0.0] * 3, [-1.0, -1.0, 1.0])
    losses, gradient, metrics = told(ppo_clip, given, Hyperparameters(clip_dual=3.0))
    assert losses == pytest.approx([3.0, 1.6487212, -1.28])
    assert gradient == pytest.approx([0.0, 1.6487212, 0.0])
    assert metrics["clipped_dual"].tolist() == [True, False, False]


def test_gspo_gives_every_token_the_loss_of_its_call() -> None:
    given = tokens([0.2, 0.0, 0.6, -0.1, -0.5], [0.0] * 5, [1.0, 1.0, 1.0, -2.0, -2.0], [0, 0, 1, 2, 2])
    losses, gradient, metrics = told(gspo, given)
    # the calls' ratios are e^0.1, e^0.6 (clipped) and e^-0.3 (clipped)
    assert losses == pytest.approx([-1.1051709, -1.1051709, -1.28, 1.6, 1.6])
    assert gradient == pytest.approx([-1.1051709, -1.1051709, 0.0, 0.0, 0.0])
    assert metrics["ratio"].tolist() == pytest.approx([1.1051709, 1.1051709, 1.8221188, 0.7408182, 0.7408182])
    assert metrics["clipped_high"].tolist() == [False, False, True, False, False]
    assert metrics["clipped_low"].tolist() == [False, False, False, True, True]


def test_cispo_bounds_the_weight_of_a_token_and_keeps_its_gradient() -> None:
    losses, gradient, metrics = told(cispo, tokens([-0.5, -2.0], [-1.0, -1.0], [2.0, -1.0]))
    # ratios e^0.5, bounded by 1.28, and e^-1
    assert losses == pytest.approx([1.28, -0.7357589])
    assert gradient == pytest.approx([-2.56, 0.3678794])
    assert metrics["clipped_high"].tolist() == [True, False]


@pytest.mark.parametrize("loss", [reinforce, ppo_clip, gspo, cispo])
def test_at_ratio_one_every_loss_has_the_policy_gradient(loss: Loss) -> None:
    logprobs = [-0.3, -1.2, -4.0]
    _, gradient, _ = told(loss, tokens(logprobs, logprobs, [0.5, 0.5, -2.0], [0, 0, 1]))
    assert gradient == pytest.approx([-0.5, -0.5, 2.0])


@pytest.mark.parametrize("loss", [reinforce, ppo_clip, gspo, cispo])
def test_a_token_that_has_moved_out_of_all_bounds_breaks_nothing(loss: Loss) -> None:
    given = tokens([-0.1, -900.0, -0.1, -900.0], [-900.0, -0.1, -900.0, -0.1], [1.0, 1.0, -1.0, -1.0])
    losses, gradient, _ = told(loss, given)
    assert all(map(torch.isfinite, map(torch.tensor, losses + gradient)))


@pytest.mark.parametrize("loss", [reinforce, ppo_clip, gspo, cispo])
def test_no_tokens_have_no_loss(loss: Loss) -> None:
    losses, _ = loss(TokenBatch(*(torch.empty(0),) * 3, torch.empty(0, dtype=torch.int64)), Hyperparameters())
    assert losses.shape == (0,)


def test_value_loss_is_half_the_square() -> None:
    values = torch.tensor([1.0, -2.0], requires_grad=True)
    losses = value_loss(values, torch.tensor([3.0, -2.0]), torch.zeros(2))
    losses.sum().backward()
    assert losses.tolist() == [2.0, 0.0]
    assert values.grad is not None
    assert values.grad.tolist() == [-2.0, 0.0]


def test_a_value_that_has_moved_beyond_its_clip_range_has_no_gradient_towards_its_target() -> None:
    # From an old value of 0 with a clip of 0.5: within the range, beyond it towards the target, beyond it away from it.
    values = torch.tensor([0.25, 1.0, -1.0], requires_grad=True)
    losses = value_loss(values, torch.full((3,), 2.0), torch.zeros(3), clip=0.5)
    losses.sum().backward()
    assert losses.tolist() == [0.5 * 1.75**2, 0.5 * 1.5**2, 0.5 * 3.0**2]
    assert values.grad is not None
    assert values.grad.tolist() == [-1.75, 0.0, -3.0]
