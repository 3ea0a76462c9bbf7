"""The trainer's logprobs and gradients are those of the plain model, however samples are divided."""

import pytest
import torch
from msgspec.structs import replace
from smallpolicy import OBJECTIVE, small_policy, some_samples

from leyden.config import AdapterConfig
from leyden.learner.errors import TrainingError
from leyden.learner.evaluation import to_arrays
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs, UpdateMetrics
from leyden.learner.sample import Sample
from leyden.rl.correction.masked import masked
from leyden.rl.correction.truncated import truncated


def plain(policy: Policy, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logits = policy.model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1] / sample.temperature
    return torch.log_softmax(logits, -1)[range(len(sample.completion_ids)), list(sample.completion_ids)]


def gradients(policy: Policy) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in policy.model.parameters() if parameter.grad is not None]
    policy.model.zero_grad()
    return found


@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_logprobs_are_the_models_with_temperature_applied(layout: str) -> None:
    policy, samples = small_policy(batch_tokens=64, layout=layout), some_samples()
    for sample, found in zip(samples, policy.logprobs(samples), strict=True):
        torch.testing.assert_close(found, plain(policy, sample).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_tokens", [64, 200, 100_000])
@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_the_gradient_is_that_of_the_textbook_however_samples_are_divided(batch_tokens: int, layout: str) -> None:
    policy, samples = small_policy(batch_tokens=batch_tokens, layout=layout), some_samples()
    expected_loss = torch.zeros(())
    for sample in samples:
        current = plain(policy, sample)
        ratio = torch.exp(current - current.detach())
        expected_loss = expected_loss - (ratio * sample.advantage * sample.weight).sum()
    expected_loss.backward()
    expected = gradients(policy)
    metrics = policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
    found = gradients(policy)
    assert metrics.loss == pytest.approx(expected_loss.item(), rel=1e-4)
    assert metrics.tokens == sum(len(sample.completion_ids) for sample in samples)
    assert metrics.grad_norm == pytest.approx(torch.cat([g.flatten() for g in expected]).norm().item(), rel=1e-4)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


def test_a_policy_that_moved_is_held_against_what_it_was() -> None:
    policy, samples = small_policy(), some_samples()
    before = to_arrays(policy.logprobs(samples))
    metrics = policy.accumulate(samples, OldLogprobs(before), OBJECTIVE)
    assert clipped(metrics) == 0
    policy.apply(metrics.grad_norm)
    later = policy.accumulate(samples, OldLogprobs(before), OBJECTIVE)
    assert clipped(later) > 0
    assert later.loss < metrics.loss


def clipped(metrics: UpdateMetrics) -> float:
    return metrics.statistics["clipped_low"] + metrics.statistics["clipped_high"]


def test_the_distance_to_the_sampler_is_zero_where_it_was_the_policy() -> None:
    policy, samples = small_policy(), some_samples()
    exact = [
        replace(sample, sampler_logprobs=tuple(lp.tolist()))
        for sample, lp in zip(samples, policy.logprobs(samples), strict=True)
    ]
    near, far = (policy.accumulate(some, OldLogprobs(), OBJECTIVE).statistics for some in (exact, samples))
    assert near["kl_sampler_k3"] == pytest.approx(0, abs=1e-8)
    assert near["ess_token"] == pytest.approx(1)
    assert far["kl_sampler_k3"] > 0.01
    assert far["ess_token"] < 1


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def moved(clip_norm: float) -> float:
    """How far the first update moves a weight at the most."""
    policy, samples = small_policy(clip_norm=clip_norm), some_samples()
    before = weights(policy)
    policy.apply(policy.accumulate(samples, OldLogprobs(), OBJECTIVE).grad_norm)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    return (weights(policy) - before).abs().max().item()


def test_gradients_are_clipped_to_the_bit_as_torch_clips_them() -> None:
    clip = 1e-8  # so small that Adam does not undo it
    for seed in range(4):
        ours, theirs = (small_policy(clip_norm=clip, dtype=torch.float64) for _ in range(2))
        samples = [replace(sample, weight=sample.weight / 8) for sample in some_samples(seed=seed)]
        norm, other = (each.accumulate(samples, OldLogprobs(), OBJECTIVE).grad_norm for each in (ours, theirs))
        assert norm == other > clip
        ours.apply(norm)
        torch.nn.utils.clip_grads_with_norm_(theirs.trained.values(), clip, torch.tensor(norm))
        theirs.optimiser.step()
        assert torch.equal(weights(ours), weights(theirs))


def test_the_share_of_tokens_is_reported_that_a_correction_bounds() -> None:
    policy, samples = small_policy(), some_samples()
    exact = [
        replace(sample, sampler_logprobs=tuple(lp.tolist()))
        for sample, lp in zip(samples, policy.logprobs(samples), strict=True)
    ]
    less_likely = tuple(lp - 1 for lp in exact[0].sampler_logprobs)  # the policy is e times likelier to draw these
    some = [replace(exact[0], sampler_logprobs=less_likely), *exact[1:]]
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
    policy, samples = small_policy(critic=critic), some_samples()
    before, policy.step = weights(policy), 7
    bad = {"target": float("nan")} if critic else {"advantage": float("inf")}
    metrics = policy.accumulate([replace(samples[0], **bad), *samples[1:]], OldLogprobs(), OBJECTIVE)
    whose = "critic" if critic else "policy"
    with pytest.raises(TrainingError, match=rf"step 7: the gradient of the {whose} is not a number.*learning_rate"):
        policy.apply(1.0 if critic else metrics.grad_norm)
    assert torch.equal(weights(policy), before)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_full_gpu_ends_training_and_says_what_to_lower(evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    policy, samples = small_policy(batch_tokens=512), some_samples()
    monkeypatch.setattr(policy, "_forward", full)
    with pytest.raises(TrainingError, match=r"step 1: .* lower `training.batch_tokens` \(now 512\).*Tried to allocate"):
        policy.logprobs(samples) if evaluates else policy.accumulate(samples, OldLogprobs(), OBJECTIVE)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1]), ("linear", [0.5, 1, 2 / 3, 1 / 3]), ("cosine", [0.5, 1, 0.75, 0.25])],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    policy = small_policy(schedule=schedule, warmup_steps=1, steps=4, updates_per_step=2, learning_rate=0.5)
    rates = []
    for policy.step in range(1, 5):
        rates.append(policy.learning_rate / 0.5)
        policy.apply(policy.accumulate(some_samples(2), OldLogprobs(), OBJECTIVE).grad_norm)
        assert policy.optimiser.param_groups[0]["lr"] == policy.learning_rate  # however many updates a step has
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(("lora", "expected"), [(None, 8e-4), (AdapterConfig(rank=2), 8e-3)], ids=["weights", "lora"])
def test_the_default_learning_rate_is_higher_for_adapters(lora: AdapterConfig | None, expected: float) -> None:
    assert small_policy(lora=lora, learning_rate=None).learning_rate == expected
