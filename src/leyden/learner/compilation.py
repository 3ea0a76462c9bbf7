"""Compiles the layers of a model on a GPU, whose host otherwise launches small kernels more slowly than they run."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

_SETTINGS = {
    "recompile_limit": 32,  # variants of a layer: with and without gradients, for each kind of mask and of layer
    "specialize_float": True,  # a layer's numbers are constants: as inputs they are computed on the CPU, in C++
}
"""Of torch.compile. Since torch 2.13 they hold only for the thread that sets them, so every call of a layer does."""
_OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}
"""Otherwise some sums are fused above a number of tokens only, and layers compiled again for small micro-batches."""


def compile_layers(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer when it is first used. Equal layers share what is compiled, for any number of tokens."""
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # what is in float32 stays exact
    known = torch._inductor.list_options() if backend == "inductor" else ()
    options: dict[str, Any] = {name: value for name, value in _OPTIONS.items() if name in known}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # with True also the numbers of a sharded layer, such as its size of heads, would vary, as attention forbids
            dynamic = None if isinstance(layer, FSDPModule) else True
            compiled = torch.compile(layer.forward, backend=backend, dynamic=dynamic, options=options)
            layer.forward = _with_settings(compiled)  # hooks, such as those that gather its parameters, stay outside


def _with_settings(compiled: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in _SETTINGS.items():
            setattr(torch._dynamo.config, name, value)
        return compiled(*args, **kwargs)

    return call
