"""Compiles the layers of a model on a GPU, whose host otherwise launches small kernels more slowly than they run."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

_MAX_VARIANTS = 32
"""Variants of a layer that are compiled: with and without gradients, for each kind of mask and of layer."""
_OPTIONS = {"triton.mix_order_reduction": False}
"""Used or not by the number of tokens, so that layers would be compiled again for small micro-batches."""


def compile_layers(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer when it is first used. Equal layers share what is compiled, for any number of tokens."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    torch._dynamo.config.specialize_float = True  # else a layer's numbers are computed on the CPU, by a C++ compiler
    known = torch._inductor.list_options() if backend == "inductor" else ()
    options = {name: value for name, value in _OPTIONS.items() if name in known}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(backend=backend, dynamic=True, options=options)
