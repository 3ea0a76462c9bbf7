"""A micro-batch that is larger than planned recomputes its activations; so does every one where that is configured."""

import pytest
import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples
from torch import nn
from transformers import OPTConfig, OPTForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.config import TrainingConfig
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs


def forward_passes(policy: Policy) -> float:
    """How often a layer is computed for each micro-batch of an update."""
    calls: list[nn.Module] = []
    layer = next(layer for layer in policy.model.modules() if isinstance(layer, GradientCheckpointingLayer))
    norm = next(module for module in layer.modules() if "Norm" in type(module).__name__)
    norm.register_forward_hook(lambda module, *_: calls.append(module))
    samples = some_samples()
    policy.logprobs(samples)
    microbatches = len(calls)
    policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
    return (len(calls) - microbatches) / microbatches


@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_only_micro_batches_above_batch_tokens_are_recomputed(layout: str) -> None:
    longest = max(map(len, some_samples()))
    assert forward_passes(small_policy(batch_tokens=4, layout=layout)) == 2
    assert forward_passes(small_policy(batch_tokens=2 * longest, layout=layout)) == 1


def test_all_are_recomputed_where_it_is_configured() -> None:
    assert forward_passes(small_policy(batch_tokens=100_000, gradient_checkpointing=True)) == 2


def test_a_layer_with_dropout_computes_the_same_gradient_with_and_without_it() -> None:
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
        config = OPTConfig(vocab_size=64, num_attention_heads=4, max_position_embeddings=256, dropout=0.5, **shape)
        policy = Policy(OPTForCausalLM(config).eval(), TrainingConfig(gradient_checkpointing=checkpointing))
        policy.accumulate(some_samples(), OldLogprobs(), OBJECTIVE)
        return [parameter.grad for parameter in policy.trained.values() if parameter.grad is not None]

    for with_it, without in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(with_it, without)
