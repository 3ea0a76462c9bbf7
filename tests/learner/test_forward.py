"""Logits are what the model's own code makes of its hidden states, and computed only where they are wanted."""

from typing import Any

import pytest
import torch
from smallpolicy import OBJECTIVE, some_samples
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    OPTConfig,
    PreTrainedModel,
)

from leyden.config import TrainingConfig
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs
from leyden.learner.sample import Sample
from leyden.rl import logprobs as logprobs_module

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
GROUPED = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}
MODELS = {
    "gemma2": Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**GROUPED, head_dim=8, final_logit_softcapping=2.0),
    "cohere": CohereConfig(**GROUPED, logit_scale=0.25),
    "granite": GraniteConfig(**GROUPED, logits_scaling=8.0),
    "falcon-h1": FalconH1Config(
        **GROUPED, lm_head_multiplier=3.0, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    ),
}


def make(config: Any, spread: float = 0.3) -> PreTrainedModel:
    torch.manual_seed(0)
    config.initializer_range = spread
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def plain(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    answer: Any = model(input_ids=torch.tensor([[*sample.prompt_ids, *sample.completion_ids]]), use_cache=False)
    scores = torch.log_softmax(answer.logits[0, len(sample.prompt_ids) - 1 : -1] / sample.temperature, -1)
    return scores[range(len(sample.completion_ids)), list(sample.completion_ids)]


def check(model: PreTrainedModel, policy: Policy) -> None:
    """Logprobs and gradients are those of the model's own forward over each sample."""
    samples = some_samples(4)
    for sample, found in zip(samples, policy.logprobs(samples), strict=True):
        torch.testing.assert_close(found, plain(model, sample).detach(), atol=1e-5, rtol=1e-5)
    policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    loss = torch.stack([-(plain(model, sample) * sample.advantage * sample.weight).sum() for sample in samples]).sum()
    loss.backward()
    for name, each in model.named_parameters():
        assert each.grad is not None
        torch.testing.assert_close(found[name], each.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_that_are_scaled_or_bounded_are_computed_only_where_a_token_was_sampled(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_CPU_CHUNK_LOGITS", 5 * 64)
    model = make(MODELS[kind])
    policy = Policy(model, TrainingConfig())
    widths: list[int] = []
    head: Any = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, given, logits: widths.append(logits.shape[:-1].numel()))
    policy.logprobs(some_samples(4))
    handle.remove()
    assert max(widths) == 5
    check(model, policy)


def test_a_bound_that_small_logits_hardly_feel_is_kept() -> None:
    model = make(Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=2.0), spread=0.01)
    policy = Policy(model, TrainingConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(30.0)
    check(model, policy)


def test_a_model_without_a_separable_head_computes_all_logits() -> None:
    model = make(OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32))
    policy = Policy(model, TrainingConfig())
    assert policy._forward._head is None
    check(model, policy)
