"""Divides the memory of one GPU between the trainer and the engine.

The plan is computed and printed before anything starts; a plan that cannot work raises a one-line `ConfigError`.
"""

import torch
from msgspec import Struct
from transformers import PreTrainedModel

from leyden.config import Config, ConfigError
from leyden.learner.loading import memory_for_training

_GIB = 2**30
_LOGITS_BYTES = 4 * _GIB
"""A chunk of logits, its gradient, and temporaries."""
_RESERVE_BYTES = 4 * _GIB
"""For CUDA contexts, fragmentation and whatever else is on the device."""
_CONTEXT_BYTES = _GIB
"""The CUDA context of this process is smaller; the reserve has room for it."""
_MAX_ENGINE_SHARE, _MIN_ENGINE_SHARE = 0.6, 0.1
"""More than the larger share of the device does not make sampling faster; less than the smaller makes it slow."""
_MIN_SLOT_TOKENS = 1024
"""The embedded engine has at least this many tokens of KV cache for each of its requests."""
_ASLEEP_BYTES = 3 * _GIB
"""What a sleeping vLLM keeps beyond the reserve, such as its CUDA graphs."""


class MemoryPlan(Struct, frozen=True):
    """Bytes of one GPU, by use."""

    device: int
    training: int
    """Weights, master weights, gradients, optimiser state."""
    activations: int
    engine: int
    """Weights and KV cache of the engine."""
    kv_cache: int
    """The part of the engine's that is its KV cache."""
    others: int = 0
    """In use by other processes."""
    engine_sleeps: bool = False
    """Whether the engine must free its memory while the policy is trained."""

    @property
    def engine_share(self) -> float:
        """The engine's part of the device."""
        return self.engine / self.device

    @property
    def trainer_share(self) -> float:
        """The part of the device that the trainer may take beside an engine in another process."""
        beside = _ASLEEP_BYTES if self.engine_sleeps else self.engine
        return (self.device - beside - self.others - _RESERVE_BYTES) / self.device

    def __str__(self) -> str:
        engine = "engine (asleep during training)" if self.engine_sleeps else "engine"
        parts = {"training": self.training, "activations": self.activations, engine: self.engine}
        parts["reserve"] = _RESERVE_BYTES
        if self.others:
            parts["other processes"] = self.others
        listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
        return f"memory: {listed} of {self.device / _GIB:.0f} GiB"


def plan_memory(
    config: Config,
    model: PreTrainedModel,
    device: int,
    training: bool,
    reference: bool,
    others: int = 0,
    slots: int | None = None,
) -> MemoryPlan:
    """Divide a device of so many bytes, of which other processes use some.

    vLLM sleeps during training if it would have too little memory beside it, or less than `engine.memory`; not beside
    agents that go on (`training.max_staleness`). With `slots`, the engine is the embedded one with so many requests,
    which cannot sleep.
    Raises `ConfigError` if it does not fit.
    """
    if others < _CONTEXT_BYTES:  # what this process has outside of torch's allocator counts as another's
        others = 0
    text = model.config.get_text_config()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    needed, activations = weights, 0
    if training:
        dtype = str(model.dtype).removeprefix("torch.")
        needed = memory_for_training(model, dtype, config.training.lora, reference)
        activations = _activation_bytes(model, config) + _LOGITS_BYTES
    free = device - others - needed - _RESERVE_BYTES
    beside, alone = free - activations, free if activations + _ASLEEP_BYTES <= free else 0
    used = f"other processes use {others / _GIB:.1f}, " if others else ""
    used = f"of {device / _GIB:.0f} GiB {used}training takes {(needed + activations) / _GIB:.1f}"
    kv_token = _kv_bytes(model)
    least = weights + kv_token * (text.max_position_embeddings if slots is None else slots * _MIN_SLOT_TOKENS)
    share = config.engine.memory
    sleeps = slots is None and beside < max(least, int((share or _MIN_ENGINE_SHARE) * device)) and alone > beside
    left = alone if sleeps else beside
    engine = min(left, int((share or _MAX_ENGINE_SHARE) * device))
    if share is not None and engine < int(share * device):
        raise ConfigError(
            f"`engine.memory`: {used}, which leaves a share of {max(left, 0) / device:.2f} for the engine: "
            "set it to that at most, or leave it out"
        )
    if left < least:
        raise ConfigError(
            f"`model`: {used} and the engine at least {least / _GIB:.1f}: "
            "lower `training.batch_tokens`, set `training.gradient_checkpointing = true` or `training.lora`, "
            + ('take `engine.kind = "torch"`' if slots is None else "lower `engine.slots`")
            + ", or a smaller model"
        )
    if sleeps and training and config.training.max_staleness:
        raise ConfigError(
            f"`training.max_staleness`: {used}, so the engine must sleep while weights are trained, and agents "
            "cannot go on: set it to 0, or lower `engine.memory` or `training.batch_tokens`"
        )
    return MemoryPlan(device, needed, activations, engine, engine - weights, others, sleeps)


def _activation_bytes(model: PreTrainedModel, config: Config) -> int:
    """Return the bytes that the layers keep of a micro-batch for the backward pass.

    For each token that is five tensors of the MLP's width and ten of the model's in the precision of the model, and
    five of the norms in float32. With gradient checkpointing it is the input of each layer. On an H200 the trainer of a
    Qwen2.5 with 1.8 billion parameters peaked at 64 GiB with 8,192 tokens, where this gives 66.
    """
    text, size = model.config.get_text_config(), torch.finfo(model.dtype).bits // 8
    hidden, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    per_token = size * hidden
    if not config.training.gradient_checkpointing:
        per_token = size * (5 * inner + 10 * hidden) + 4 * 5 * hidden
    return int(text.num_hidden_layers * config.training.batch_tokens * per_token)


def _kv_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the keys and values of one token."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * torch.finfo(model.dtype).bits // 8)
