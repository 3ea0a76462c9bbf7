"""In bfloat16 no update is lost: masters are float32, and gradients are added up in float32."""

import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples

from leyden.config import AdapterConfig
from leyden.learner.protocol import OldLogprobs


def test_updates_too_small_for_bfloat16_add_up() -> None:
    policy = small_policy(dtype=torch.bfloat16, learning_rate=1e-5)
    before = {name: master.detach().clone() for name, master in policy.trained.items()}
    for _ in range(10):
        metrics = policy.accumulate(some_samples(), OldLogprobs(), OBJECTIVE)
        policy.apply(metrics.grad_norm)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = policy.trained[name].detach() - before[name]
    assert policy.trained[name].dtype == torch.float32
    assert moved.abs().median() > 2e-5  # the sum of 10 steps; one step of 1e-5 is less than half a unit of bfloat16
    computed = policy.model.get_parameter(name)
    assert computed.dtype == torch.bfloat16
    assert torch.equal(computed, policy.trained[name].bfloat16())


def test_gradients_of_microbatches_are_added_in_float32() -> None:
    policy, samples = small_policy(dtype=torch.bfloat16, layout="rows", batch_tokens=64), some_samples()
    alone = []
    for sample in samples:
        policy.accumulate([sample], OldLogprobs(), OBJECTIVE)
        alone.append({name: each.grad.clone() for name, each in policy.trained.items() if each.grad is not None})
        policy.optimiser.zero_grad(set_to_none=True)
    policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
    for name, each in policy.trained.items():
        assert each.grad is not None and each.grad.dtype == torch.float32
        expected = torch.stack([gradients[name] for gradients in alone]).sum(0)
        torch.testing.assert_close(each.grad, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_adapters_are_float32_whatever_the_model() -> None:
    policy = small_policy(dtype=torch.bfloat16, lora=AdapterConfig(rank=2))
    metrics = policy.accumulate(some_samples(), OldLogprobs(), OBJECTIVE)
    policy.apply(metrics.grad_norm)
    assert {each.dtype for each in policy.trained.values()} == {torch.float32}
    assert {each.dtype for each in policy.served.parameters()} == {torch.bfloat16}
