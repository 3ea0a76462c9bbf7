"""Merges sharded LoRA matrices into the weights that they belong to: each rank the rows that it has."""

from collections.abc import Callable
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from leyden.learner.lora import LoraAdapter, MergedLoraLinear
from leyden.learner.stochastic_rounding import round_to_bfloat16


def merged_shards(adapter: LoraAdapter) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute the sharded weights with an adapter, by the names that they have without it."""
    return {f"{name}.weight": partial(_merged, name, layer) for name, layer in adapter.layers.items()}


@torch.no_grad()
def _merged(name: str, layer: MergedLoraLinear) -> Tensor:
    base: Any = layer.get_base_layer()
    weight, dtype = layer.merged_weight(), base.weight.dtype
    if dtype == torch.bfloat16:
        weight = _rounded(weight, crc32(name.encode()))
    return weight.to(dtype)


def _rounded(weight: Tensor, seed: int) -> Tensor:
    """Round as the weights that the embedded engine serves, but with other chances."""
    assert isinstance(weight, DTensor)
    rounded = round_to_bfloat16(weight.to_local(), seed)
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(rounded, mesh, placements, shape=weight.shape, stride=weight.stride())
