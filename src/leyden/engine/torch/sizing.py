"""Chooses what an engine computes with, by model and device: forward pass, threads, memory, the longest sequence."""

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from leyden.engine.torch.device_llama import GRAPH_SIZES, DeviceLlamaForward
from leyden.engine.torch.forward import EngineForward, HubForward, RecomputeForward
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.llama import LlamaForward
from leyden.process.resources import usable_cores

log = logging.getLogger(__name__)

CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 256, 8192
"""Prompt tokens of one step: enough to fill the device, and few enough that decoding requests do not wait long."""
_SAMPLED_LOGITS = 6
"""How often the logits of a step are in memory while tokens are sampled."""
_OTHER_BYTES = 2**30
"""What an engine takes on a GPU beyond weights, KV cache, logits and activations."""
SMALL_MODEL = 20_000_000
"""Models with fewer parameters run on one thread: a second one would wait longer than it computes."""


def choose_forward(model: PreTrainedModel, kv_cache: KVCache, copies: bool) -> EngineForward:
    """Choose the fastest implementation that supports the model, one with its own weights if it `copies` them."""
    if copies and DeviceLlamaForward.supports(model):
        return DeviceLlamaForward(model, kv_cache)
    if not copies and LlamaForward.supports(model):
        return LlamaForward(model, kv_cache)
    if HubForward.supports(model):
        return HubForward(model, kv_cache)
    return RecomputeForward(model, kv_cache.dtype)


def limit_length(context_length: int, limit: int, slots: int, config: Any, dtype: torch.dtype) -> int:
    """Return the longest sequence with which the KV cache of all slots stays within a number of bytes."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    length = limit // (slots * 2 * config.num_hidden_layers * heads * size * dtype.itemsize)
    if length >= context_length:
        return context_length
    log.warning(
        "the KV cache of %d slots may have %.1f GiB: sequences are limited to %d tokens of the model's %d;"
        " set `engine.slots` lower for longer ones",
        slots,
        limit / 2**30,
        length,
        context_length,
    )
    return int(length)


def process_bytes(model: PreTrainedModel, slots: int) -> int:
    """Return what an engine's process takes on a GPU beside its KV cache.

    It has the parameters that it receives, and a copy to compute with. A checksum copies each tensor for a moment.
    """
    weights = [parameter.nbytes for parameter in model.parameters()]
    text = model.config.get_text_config()
    rows = next((size for size in GRAPH_SIZES if size >= slots), slots)
    kept = sum(size for size in GRAPH_SIZES if size <= rows)  # each captured graph has its own logits
    logits = 4 * int(text.vocab_size) * (kept + _SAMPLED_LOGITS * rows)
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    activations = 2 * (2 * inner + 8 * hidden) * GPU_PREFILL_TOKENS
    return 2 * sum(weights) + max(weights) + logits + activations + _OTHER_BYTES


def choose_threads(model: PreTrainedModel) -> int:
    """Return half of the cores, which leaves the rest to trainer and agents; 1 for a small model.

    The threads of one operation wait for each other: with more threads than free cores a step takes many times as
    long. On two busy cores, one thread sampled more tokens per second at 1 and 32 requests, and as many at 256.
    """
    small = sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL
    return 1 if small else max(1, usable_cores() // 2)
