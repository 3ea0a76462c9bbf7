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

from leyden.config import CheckpointConfig, ConfigError, TrainingConfig
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.loading import load_model
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
TRAINED = TrainingConfig()


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
        load_model(source, "float32", TRAINED)
    assert load_model(source, "float32").config.model_type == config.model_type


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
    model = load_model(saved(config, tmp_path), "float32", TRAINED)
    assert model.config._attn_implementation == attention
    assert Policy(model, TrainingConfig()).no_trees_reason == reason


def test_the_attention_implementation_saved_with_a_model_is_ignored(tmp_path: Path) -> None:
    source = saved(LlamaConfig(**SHAPE), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_attn_implementation": "flash_attention_2"}))
    model = load_model(source, "float32")
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
        load_model(ModelSource("small", tmp_path), "float32", TRAINED)
