"""The trainer's logprobs and gradients are those of the plain model, one row at a time, however rows are divided."""

import pytest
import torch
from msgspec.structs import replace
from smallpolicy import OBJECTIVE, small_policy, some_rows

from leyden.trainer.batch import Row
from leyden.trainer.objective import Before
from leyden.trainer.policy import Figures, Policy


def plain(policy: Policy, row: Row) -> torch.Tensor:
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    logits = policy.model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1] / row.temperature
    return torch.log_softmax(logits, -1)[range(len(row.completion_ids)), list(row.completion_ids)]


def gradients(policy: Policy) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in policy.model.parameters() if parameter.grad is not None]
    policy.model.zero_grad()
    return found


@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_logprobs_are_the_models_with_temperature_applied(layout: str) -> None:
    policy, rows = small_policy(batch_tokens=64, layout=layout), some_rows()
    for row, found in zip(rows, policy.logprobs(rows), strict=True):
        torch.testing.assert_close(found, plain(policy, row).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_tokens", [64, 200, 100_000])
@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_the_gradient_is_that_of_the_textbook_however_rows_are_divided(batch_tokens: int, layout: str) -> None:
    policy, rows = small_policy(batch_tokens=batch_tokens, layout=layout), some_rows()
    expected_loss = torch.zeros(())
    for row in rows:
        current = plain(policy, row)
        ratio = torch.exp(current - current.detach())
        expected_loss = expected_loss - (ratio * row.advantage * row.weight).sum()
    expected_loss.backward()
    expected = gradients(policy)
    figures = policy.accumulate(rows, Before(), OBJECTIVE)
    found = gradients(policy)
    assert figures.loss == pytest.approx(expected_loss.item(), rel=1e-4)
    assert figures.tokens == sum(len(row.completion_ids) for row in rows)
    assert figures.grad_norm == pytest.approx(torch.cat([g.flatten() for g in expected]).norm().item(), rel=1e-4)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


def test_a_policy_that_moved_is_held_against_what_it_was() -> None:
    policy, rows = small_policy(), some_rows()
    before = policy.logprobs(rows)
    figures = policy.accumulate(rows, Before(before), OBJECTIVE)
    assert clipped(figures) == 0
    policy.apply(figures.grad_norm)
    moved = policy.accumulate(rows, Before(before), OBJECTIVE)
    assert clipped(moved) > 0
    assert moved.loss < figures.loss


def clipped(figures: Figures) -> float:
    return figures.statistics["clipped_low"] + figures.statistics["clipped_high"]


def test_the_distance_to_the_sampler_is_zero_where_it_was_the_policy() -> None:
    policy, rows = small_policy(), some_rows()
    exact = [replace(row, sampler=tuple(lp.tolist())) for row, lp in zip(rows, policy.logprobs(rows), strict=True)]
    near, far = (policy.accumulate(some, Before(), OBJECTIVE).statistics for some in (exact, rows))
    assert near["kl_sampler_k3"] == pytest.approx(0, abs=1e-8)
    assert near["ess_token"] == pytest.approx(1)
    assert far["kl_sampler_k3"] > 0.01
    assert far["ess_token"] < 1


def test_a_large_gradient_is_bounded() -> None:
    policy, rows = small_policy(clip_norm=1e-9), some_rows()
    before = [parameter.clone() for parameter in policy.model.parameters()]
    figures = policy.accumulate(rows, Before(), OBJECTIVE)
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.model.parameters() if p.grad is not None])
    assert norm.item() == pytest.approx(figures.grad_norm)
    policy.apply(figures.grad_norm)
    for old, new in zip(before, policy.model.parameters(), strict=True):
        assert (old - new).abs().max() <= 1.1e-2  # Adam's first step is the learning rate, whatever the gradient
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1]), ("linear", [0.5, 1, 2 / 3, 1 / 3]), ("cosine", [0.5, 1, 0.75, 0.25])],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    policy, rows = small_policy(schedule=schedule, warmup_steps=1, steps=4, learning_rate=0.5), some_rows(2)
    rates = []
    for _ in range(4):
        rates.append(policy.learning_rate / 0.5)
        policy.apply(policy.accumulate(rows, Before(), OBJECTIVE).grad_norm)
    assert rates == pytest.approx(expected)
