"""With LoRA in bfloat16, what is trained is what is served and saved, also while it is small."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples
from torch import Tensor
from transformers import AutoModelForCausalLM

from leyden.config import AdapterConfig, TrainingConfig
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs

LORA = AdapterConfig(rank=8, alpha=16)


def trained(steps: int = 3, **settings: Any) -> Policy:
    policy = small_policy(lora=LORA, **settings)
    for seed in range(steps):
        metrics = policy.accumulate(some_samples(seed=seed), OldLogprobs(), OBJECTIVE)
        policy.apply(metrics.grad_norm)
    return policy


def changes(policy: Policy) -> tuple[Tensor, Tensor]:
    """Return by how much the served weights and those with the exact adapter differ from the base weights."""
    assert policy.adapter is not None
    served, base, tensors = dict(policy.served_tensors()), dict(policy.adapter.base_tensors()), policy.adapter.weights()
    found = [
        (
            served[f"{name}.weight"].float() - base[f"{name}.weight"].float(),
            tensors.tensors[f"{name}.lora_B.weight"] @ tensors.tensors[f"{name}.lora_A.weight"],
        )
        for name in {name.partition(".lora_")[0] for name in tensors.tensors}
    ]
    return torch.cat([each.flatten() for each, _ in found]), torch.cat([each.flatten() for _, each in found])


@pytest.mark.parametrize(("steps", "learning_rate"), [(1, 1e-5), (3, 1e-5), (3, 1e-4)])
def test_updates_of_any_size_reach_the_served_weights(steps: int, learning_rate: float) -> None:
    served, exact = changes(trained(steps, dtype=torch.bfloat16, learning_rate=learning_rate))
    assert (served @ exact / (exact @ exact)).item() == pytest.approx(
        1, abs=0.3
    )  # 0.02 to 0.34 if rounded to the nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainer_computes_with_the_weights_that_are_served_and_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    policy = trained(dtype=dtype, learning_rate=1e-3)
    plain = small_policy(dtype=dtype)
    for model in (policy.served, saved(policy, tmp_path, dtype)):
        plain.model.load_state_dict(model.state_dict())
        pairs = zip(policy.logprobs(some_samples()), plain.logprobs(some_samples()), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def saved(policy: Policy, folder: Path, dtype: torch.dtype) -> Any:
    policy.served.save_pretrained(folder, state_dict=policy.weights())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def test_the_gradient_is_that_of_unmerged_adapters() -> None:
    merged, unmerged = trained(learning_rate=1e-2), trained(learning_rate=1e-2)
    assert unmerged.adapter is not None
    unmerged.adapter.compute_unmerged()
    for policy in (merged, unmerged):
        policy.accumulate(some_samples(seed=7), OldLogprobs(), OBJECTIVE)
    for name, parameter in merged.trained.items():
        expected = unmerged.trained[name].grad
        assert parameter.grad is not None and expected is not None and expected.any()
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-6)


def test_merging_again_changes_nothing() -> None:
    policy = trained(dtype=torch.bfloat16, learning_rate=1e-4)
    before = [tensor.clone() for _, tensor in policy.served_tensors()]
    assert policy.adapter is not None
    policy.adapter.publish()
    assert all(torch.equal(now, then) for (_, now), then in zip(policy.served_tensors(), before, strict=True))


def test_an_adapter_that_lacks_a_matrix_is_refused() -> None:
    adapter = trained().adapter
    assert adapter is not None
    saved = dict(adapter.model.named_parameters())
    missing = next(name for name in saved if "lora_B" in name)
    del saved[missing]
    with pytest.raises(KeyError, match=missing):
        adapter.saved_weights(saved)


def test_policies_over_one_base_share_its_memory_and_nothing_else() -> None:
    first = small_policy(lora=LORA, dtype=torch.bfloat16)
    alone = trained(dtype=torch.bfloat16)
    torch.manual_seed(5)
    second = Policy(
        deepcopy(first.served), TrainingConfig(lora=AdapterConfig(rank=2), learning_rate=1e-2), beside=first
    )
    assert first.adapter is not None and second.adapter is not None
    ours, theirs = dict(first.adapter.base_parameters()), dict(second.adapter.base_parameters())
    assert all(theirs[name] is parameter for name, parameter in ours.items())
    assert (first.shares_base, second.shares_base) == (False, True)
    base = {name: tensor.clone() for name, tensor in first.adapter.base_tensors()}
    for seed in range(3):
        for policy in (first, second):
            policy.apply(policy.accumulate(some_samples(seed=seed), OldLogprobs(), OBJECTIVE).grad_norm)
    assert all(torch.equal(tensor, base[name]) for name, tensor in second.adapter.base_tensors())
    expected = dict(alone.served_tensors())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in first.served_tensors())
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in second.served_tensors())
