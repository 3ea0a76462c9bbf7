"""Logprobs are the same however many tokens are computed at a time, and so are gradients."""

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor

from leyden.rl import logprobs as room
from leyden.rl.logprobs import logprobs


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_some_at_a_time_is_the_same_as_all_at_once(entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, dtype=torch.float64)
    hidden = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    targets, temperatures = torch.randint(50, (23,)), torch.rand(23) + 0.5
    scores = torch.log_softmax(head(hidden) / temperatures[:, None].double(), -1)
    expected, entropy = scores[range(23), targets], -(scores.exp() * scores).sum(-1)
    (expected.sum() + (entropy.square().sum() if entropy_gradient else 0)).backward()
    wanted = hidden.grad.clone(), head.weight.grad.clone()
    for at_once in (50, 200, 50 * 23):
        monkeypatch.setattr(room, "_CPU_CHUNK_LOGITS", at_once)
        hidden.grad = head.weight.grad = None
        found, entropies = logprobs(head, hidden, targets, temperatures, 50, entropy_gradient)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(entropies, entropy)
        assert entropies.requires_grad == entropy_gradient
        (found.sum() + (entropies.square().sum() if entropy_gradient else 0)).backward()
        torch.testing.assert_close(hidden.grad, wanted[0])
        torch.testing.assert_close(head.weight.grad, wanted[1])


def test_half_precision_is_summed_in_single() -> None:
    head, hidden = torch.nn.Linear(8, 50, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16)
    found, entropies = logprobs(head, hidden, torch.arange(5), torch.ones(5), 50)
    assert found.dtype is entropies.dtype is torch.float32


def test_logits_are_freed_by_the_backward_pass_although_the_result_is_held() -> None:
    head = torch.nn.Linear(8, 50)
    logits: list[ref[Tensor]] = []

    def observed(hidden: Tensor) -> Tensor:
        made = head(hidden)
        logits.append(ref(made))
        return made

    hidden = torch.randn(23, 8, requires_grad=True)
    found, _ = logprobs(observed, hidden, torch.randint(50, (23,)), torch.ones(23), 50)
    assert logits[0]() is not None  # so few are kept for the backward pass
    found.sum().backward()
    gc.collect()
    assert [one() for one in logits] == [None]
    assert found.grad_fn is not None
