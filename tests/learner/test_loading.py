"""A model is loaded with the attention that it has, or refused where training would not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from leyden.config import AdapterConfig, CheckpointConfig, ConfigError, TrainingConfig
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.loading import load_model, memory_for_training
from leyden.learner.policy import Policy
from leyden.models.source import ModelSource
from leyden.records import DEFAULT_POLICY

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LORA = AdapterConfig(rank=4, modules=("q_proj", "down_proj"))


def make(config: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def saved(config: Any, folder: Path) -> ModelSource:
    make(config).save_pretrained(folder)
    return ModelSource("small", folder)


@pytest.mark.parametrize(
    "config", [MixtralConfig(**SHAPE), Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16)], ids=["mixtral", "qwen3"]
)
def test_a_mixture_of_experts_is_served_but_not_trained(config: Any, tmp_path: Path) -> None:
    source = saved(config, tmp_path)
    with pytest.raises(ConfigError, match="is a mixture of experts"):
        load_model(source, "float32", training=True)
    assert load_model(source, "float32", training=False).config.model_type == config.model_type


@pytest.mark.parametrize(
    ("config", "attention", "reason"),
    [
        (LlamaConfig(**SHAPE), "sdpa", None),
        (Gemma2Config(**SHAPE), "eager", "its attention is eager"),
        (MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), "eager", "it has layers of linear_attention"),
    ],
    ids=["llama", "gemma2", "mamba"],
)
def test_every_model_is_loaded_with_attention_that_it_has(
    config: Any, attention: str, reason: str | None, tmp_path: Path
) -> None:
    model = load_model(saved(config, tmp_path), "float32", training=True)
    assert model.config._attn_implementation == attention
    assert Policy(model, TrainingConfig()).no_trees_reason == reason


def test_the_attention_implementation_saved_with_a_model_is_ignored(tmp_path: Path) -> None:
    source = saved(LlamaConfig(**SHAPE), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_attn_implementation": "flash_attention_2"}))
    model = load_model(source, "float32", training=False)
    assert model.config._attn_implementation == "sdpa"
    policy = Policy(model, TrainingConfig())
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    Checkpoints(tmp_path, DEFAULT_POLICY, source, CheckpointConfig()).load(policy, 0)
    assert all(map(torch.equal, before, model.parameters()))


def test_an_unknown_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "tomorrow"}')
    with pytest.raises(ConfigError, match="small cannot be loaded: "):
        load_model(ModelSource("small", tmp_path), "float32", training=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "lora"])
@pytest.mark.parametrize("reference", [False, True])
def test_the_memory_for_training_is_what_training_holds(
    dtype: str, lora: AdapterConfig | None, reference: bool
) -> None:
    model = make(LlamaConfig(**SHAPE)).to(getattr(torch, dtype))
    expected = memory_for_training(model, dtype, lora, reference)
    policy = Policy(model, TrainingConfig(lora=lora), reference=reference)
    copies = {id(policy.served): policy.served, id(policy.model): policy.model}
    if reference and policy._reference is not None:
        copies[id(policy._reference._model)] = policy._reference._model
    for parameter in policy.trained.values():
        parameter.grad = torch.zeros_like(parameter)
    policy.optimiser.step()
    moments = [each for state in policy.optimiser.state.values() for each in state.values() if each.ndim]
    gradients = [each.grad for each in policy.trained.values() if each.grad is not None]
    weights = {id(each): each for copy in copies.values() for each in copy.parameters()}
    weights |= {id(each): each for each in policy.trained.values()}
    assert expected == sum(each.nbytes for each in (*moments, *gradients, *weights.values()))


def test_the_memory_for_training_in_numbers() -> None:
    model = make(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    weights = model.num_parameters()
    adapters = 2 * 4 * ((32 + 32) + (48 + 32))  # layers, rank, and the two sides of q_proj and of down_proj
    assert weights == 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert memory_for_training(model, "float32", None, False) == 16 * weights
    assert memory_for_training(model, "float32", None, True) == 20 * weights
    assert memory_for_training(model, "bfloat16", None, False) == 18 * weights
    assert memory_for_training(model, "float32", LORA, True) == 8 * weights + 16 * adapters
    assert memory_for_training(model, "bfloat16", LORA, False) == 4 * weights + 16 * adapters


def test_a_refusal_says_what_would_fit_and_what_fits_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(LlamaConfig(**SHAPE), tmp_path)
    weights = make(LlamaConfig(**SHAPE)).num_parameters()
    monkeypatch.setattr("leyden.learner.loading.device", lambda: torch.device("cpu"))
    monkeypatch.setattr("leyden.learner.loading.free_memory", lambda: 16 * weights)
    load_model(source, "float32", training=True)
    with pytest.raises(ConfigError, match=r"use a smaller model, a larger machine or `training.lora`$"):
        load_model(source, "float32", True, reference=True)
    load_model(source, "float32", True, LORA, reference=True)
    monkeypatch.setattr("leyden.learner.loading.free_memory", lambda: 4 * weights)
    with pytest.raises(ConfigError, match=r'a larger machine or `engine.dtype = "bfloat16"`$'):
        load_model(source, "float32", True, LORA)
    with pytest.raises(ConfigError, match=r"use a smaller model or a larger machine$"):
        load_model(source, "bfloat16", True, LORA)
