"""The trainer's logprobs and gradients are those of the plain model, one row at a time, however rows are divided."""

import pytest
import torch
from msgspec.structs import replace
from smallpolicy import OBJECTIVE, small_policy, some_rows

from leyden.rl.correction.masked import masked
from leyden.rl.correction.truncated import truncated
from leyden.trainer.batch.samples import Sample
from leyden.trainer.errors import TrainingError
from leyden.trainer.policy.objective import OldLogprobs
from leyden.trainer.policy.policy import Policy, UpdateMetrics


def plain(policy: Policy, row: Sample) -> torch.Tensor:
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
    figures = policy.accumulate(rows, OldLogprobs(), OBJECTIVE)
    found = gradients(policy)
    assert figures.loss == pytest.approx(expected_loss.item(), rel=1e-4)
    assert figures.tokens == sum(len(row.completion_ids) for row in rows)
    assert figures.grad_norm == pytest.approx(torch.cat([g.flatten() for g in expected]).norm().item(), rel=1e-4)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


def test_a_policy_that_moved_is_held_against_what_it_was() -> None:
    policy, rows = small_policy(), some_rows()
    before = policy.logprobs(rows)
    figures = policy.accumulate(rows, OldLogprobs(before), OBJECTIVE)
    assert clipped(figures) == 0
    policy.apply(figures.grad_norm)
    later = policy.accumulate(rows, OldLogprobs(before), OBJECTIVE)
    assert clipped(later) > 0
    assert later.loss < figures.loss


def clipped(figures: UpdateMetrics) -> float:
    return figures.statistics["clipped_low"] + figures.statistics["clipped_high"]


def test_the_distance_to_the_sampler_is_zero_where_it_was_the_policy() -> None:
    policy, rows = small_policy(), some_rows()
    exact = [replace(row, sampler=tuple(lp.tolist())) for row, lp in zip(rows, policy.logprobs(rows), strict=True)]
    near, far = (policy.accumulate(some, OldLogprobs(), OBJECTIVE).statistics for some in (exact, rows))
    assert near["kl_sampler_k3"] == pytest.approx(0, abs=1e-8)
    assert near["ess_token"] == pytest.approx(1)
    assert far["kl_sampler_k3"] > 0.01
    assert far["ess_token"] < 1


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def moved(clip_norm: float) -> float:
    """How far the first update moves a weight at the most."""
    policy, rows = small_policy(clip_norm=clip_norm), some_rows()
    before = weights(policy)
    policy.apply(policy.accumulate(rows, OldLogprobs(), OBJECTIVE).grad_norm)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    return (weights(policy) - before).abs().max().item()


def test_the_share_of_tokens_is_reported_that_a_correction_bounds() -> None:
    policy, rows = small_policy(), some_rows()
    exact = [replace(row, sampler=tuple(lp.tolist())) for row, lp in zip(rows, policy.logprobs(rows), strict=True)]
    less_likely = tuple(lp - 1 for lp in exact[0].sampler)  # the policy is e times likelier to draw these
    some = [replace(exact[0], sampler=less_likely), *exact[1:]]
    for correction in (truncated, masked):
        corrected = replace(OBJECTIVE, correction=correction)
        found = policy.accumulate(some, OldLogprobs(), corrected)
        assert found.statistics["corrected"] == pytest.approx(len(less_likely) / found.tokens)
    assert "corrected" not in policy.accumulate(some, OldLogprobs(), OBJECTIVE).statistics


def test_a_large_gradient_is_bounded() -> None:
    assert moved(clip_norm=1e9) == pytest.approx(1e-2, rel=1e-3)  # Adam's first step is the learning rate,
    assert moved(clip_norm=1e-9) < 1e-3  # unless the gradient is as small as what Adam adds to its size


@pytest.mark.parametrize("critic", [False, True])
def test_a_gradient_that_is_no_number_ends_training_and_leaves_the_weights(critic: bool) -> None:
    policy, rows = small_policy(critic=critic), some_rows()
    before, policy.step = weights(policy), 7
    bad = {"target": float("nan")} if critic else {"advantage": float("inf")}
    figures = policy.accumulate([replace(rows[0], **bad), *rows[1:]], OldLogprobs(), OBJECTIVE)
    whose = "critic" if critic else "policy"
    with pytest.raises(TrainingError, match=rf"step 7: the gradient of the {whose} is not a number.*learning_rate"):
        policy.apply(1.0 if critic else figures.grad_norm)
    assert torch.equal(weights(policy), before)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1]), ("linear", [0.5, 1, 2 / 3, 1 / 3]), ("cosine", [0.5, 1, 0.75, 0.25])],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    policy = small_policy(schedule=schedule, warmup_steps=1, steps=4, updates_per_step=2, learning_rate=0.5)
    rates = []
    for policy.step in range(1, 5):
        rates.append(policy.learning_rate / 0.5)
        policy.apply(policy.accumulate(some_rows(2), OldLogprobs(), OBJECTIVE).grad_norm)
        assert policy.optimiser.param_groups[0]["lr"] == policy.learning_rate  # however many updates a step has
    assert rates == pytest.approx(expected)
