"""Estimates of KL against cases worked out by hand, and what their values and gradients are on average."""

from math import log

import pytest
import torch

from leyden.rl.divergence import ESTIMATES, Estimate, k1, k2, k3

P = torch.tensor([0.2, -0.7, 1.1], dtype=torch.float64)
Q = torch.tensor([1.0, 0.3, -0.4], dtype=torch.float64)
"""Logits of two policies of three actions."""


@pytest.mark.parametrize(
    ("estimate", "value", "slope"), [(k1, 0.6931472, 1.0), (k2, 0.2402265, 0.6931472), (k3, 0.1931472, 0.5)]
)
def test_by_hand(estimate: Estimate, value: float, slope: float) -> None:
    current = torch.tensor([log(0.5)], requires_grad=True)
    found = estimate(current, torch.tensor([log(0.25)]))
    found.sum().backward()
    assert found.tolist() == pytest.approx([value])
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([slope])


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def expected(estimate: Estimate) -> tuple[torch.Tensor, torch.Tensor]:
    """An estimate and its gradient for the logits, over all actions by their probability."""
    logits = P.clone().requires_grad_()
    current = logits.log_softmax(0)
    mean = (current.detach().exp() * estimate(current, Q.log_softmax(0))).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    return mean.detach(), gradient


def test_k1_and_k3_are_the_kl_on_average() -> None:
    exact = kl(P.log_softmax(0), Q.log_softmax(0)).item()
    assert expected(k1)[0].item() == pytest.approx(exact, abs=1e-14)
    assert expected(k3)[0].item() == pytest.approx(exact, abs=1e-14)
    assert expected(k2)[0].item() != pytest.approx(exact, abs=1e-2)


def test_the_gradients_in_a_loss_are_three_different_things() -> None:
    logits = P.clone().requires_grad_()
    current, reference = logits.log_softmax(0), Q.log_softmax(0)
    (forward,) = torch.autograd.grad(kl(current, reference), logits, retain_graph=True)
    (backward,) = torch.autograd.grad(kl(reference, current), logits)
    assert expected(k1)[1].tolist() == pytest.approx([0.0] * 3, abs=1e-14)
    assert expected(k2)[1].tolist() == pytest.approx(forward.tolist(), abs=1e-14)
    assert expected(k3)[1].tolist() == pytest.approx(backward.tolist(), abs=1e-14)


def test_a_token_that_the_policy_all_but_gave_up_has_a_finite_penalty() -> None:
    current = torch.tensor([-900.0], requires_grad=True)
    for estimate in ESTIMATES.values():
        (slope,) = torch.autograd.grad(estimate(current, torch.tensor([-0.1])).sum(), current)
        assert torch.isfinite(slope).all()
