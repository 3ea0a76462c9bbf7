"""Checks and loads the model to train; a `ConfigError` before any work starts says what is wrong."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from leyden.config import ConfigError, TrainingConfig
from leyden.learner.memory import check_memory
from leyden.learner.sharded_files import is_sharded, read_sharded_model
from leyden.models.source import ModelSource
from leyden.rendering.tokenizer import Tokenizer, TokenizerError


def check_tokenizer(source: ModelSource) -> None:
    """Refuse a model without a tokenizer that has a chat template."""
    try:
        tokenizer = Tokenizer.load(source.folder, source.name)
    except TokenizerError as error:
        raise ConfigError(f"`model`: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"`model`: {source.name} has no chat template, so it cannot answer chat requests: "
            "use its instruct version, or add chat_template to its tokenizer_config.json"
        )


def device() -> torch.device:
    """Return the device that models run on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model_device(model: PreTrainedModel) -> torch.device:
    """Return the device of a model; if it has no values, the device that models run on."""
    return device() if model.device.type == "meta" else model.device


def compute_dtype(dtype: str) -> str:
    """Resolve the precision that models are computed in; `auto` is bfloat16 on a GPU that has it, else float32."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device().type == "cuda" and torch.cuda.is_bf16_supported() else "float32"


def read_model_config(folder: Path) -> Any:
    """Read the configuration of a model; transformers chooses how attention is computed: SDPA if it is supported."""
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = None
    return config


def read_model(folder: Path, dtype: torch.dtype, config: Any = None) -> PreTrainedModel:
    """Read a model, from a Hugging Face folder or a sharded checkpoint."""
    config = read_model_config(folder) if config is None else config
    if is_sharded(folder):
        return read_sharded_model(folder, config, dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    return model


def load_model(
    source: ModelSource, dtype: str, training: TrainingConfig | None = None, reference: bool = False
) -> PreTrainedModel:
    """Load the model, on a GPU if there is one; for `training` only if the optimiser fits in memory too."""
    where, dtype = device(), compute_dtype(dtype)
    transformers.utils.logging.disable_progress_bar()
    try:
        config = read_model_config(source.folder)
        if training is not None:
            refuse_experts(source.name, config)
            check_memory(source.name, empty_model(config), dtype, training, reference, where)
        model = read_model(source.folder, getattr(torch, dtype), config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model`: {source.name} cannot be loaded: {str(error).splitlines()[0]}") from error
    model.eval()  # no dropout: training must compute what was sampled
    return model.to(where)  # type: ignore[no-any-return, arg-type]  # transformers wraps `to` without types


def refuse_experts(name: str, config: Any) -> None:
    """Refuse a mixture of experts: engine and trainer may route a token to different experts."""
    text = config.get_text_config()
    if any((getattr(text, key, None) or 0) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(
            f"`model`: {name} is a mixture of experts, whose routing is not replayed in training yet: use a dense model"
        )


def count_parameters(source: ModelSource) -> int:
    """Count the parameters of a model without loading them."""
    try:
        return int(empty_model(read_model_config(source.folder)).num_parameters())
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model`: {source.name} cannot be loaded: {str(error).splitlines()[0]}") from error


def empty_model(config: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a model without memory for its parameters."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model
