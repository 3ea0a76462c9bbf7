"""The memory that weights and optimiser take, on each device that trains and on the host: a lower bound.

Activations come on top of it (`local/memory_plan.py`).
"""

import os

import torch
from msgspec import Struct
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.config import AdapterConfig, ConfigError, TrainingConfig
from leyden.process.resources import free_memory

_MASTER, _GRADIENT, _MOMENTS = 4, 4, 8
"""Bytes of a trained parameter: all in float32."""
_STAGED = 16
"""Bytes of an element of the largest parameter: pinned memory has gradients and weights of two buckets on their way."""
_UNIT_BYTES = 2**28
"""Of small layers that are gathered together: a call for each costs the host time, in which it starts no kernel."""
_WHOLE_SHARE = 0.1
"""Of the memory of a device, for weights and gradients that it would otherwise have a share of."""


class TrainingMemory(Struct, frozen=True):
    """Bytes that training takes."""

    device: int
    """Of each device that trains."""
    host: int = 0


def memory_for_training(
    model: PreTrainedModel, dtype: str, training: TrainingConfig, reference: bool
) -> TrainingMemory:
    """Return the bytes of weights and optimiser, of a model that may have no values.

    On one device the weights that are computed with are beside their masters, unless both are float32. With LoRA there
    are two models: the served one, and one with adapters, which is the reference if they are disabled. Of several
    devices each has a share of the masters only, or with LoRA of one model; layers are gathered when they compute, or
    all of them once for an update (`keeps_whole`).
    """
    weights, each, devices = model.num_parameters(), getattr(torch, dtype).itemsize, training.devices
    host = 0
    if (lora := training.lora) is not None:
        copies = 2 if devices == 1 else 1
        device = copies * weights * each + (_MASTER + _GRADIENT + _MOMENTS) * _adapter_size(model, lora)
    else:
        computed = each if devices == 1 and dtype != "float32" else 0
        of_each = _MASTER + _GRADIENT + _MOMENTS + computed
        if training.offload == "optimiser":
            of_each = each + _GRADIENT
            host = (_MASTER + _MOMENTS) * weights + _STAGED * max(one.numel() for one in model.parameters())
        device = weights * (of_each + each * reference)
    if devices > 1:
        whole = weights * (each + _GRADIENT * (lora is None) + each * reference)
        gathered = whole if keeps_whole(whole) else _gathered_size(model, each) * (each + _GRADIENT)
        device = -(-device // devices) + gathered
        host = weights * (each if lora is not None else _MASTER)  # rank 0 reads the model
    return TrainingMemory(int(device), int(host))


def keeps_whole(size: int) -> bool:
    """Whether each of several devices keeps so many bytes of weights and gradients whole until an update is computed.

    That takes a tenth of its memory at the most. They are then gathered once for an update, not for each micro-batch.
    """
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return size <= _WHOLE_SHARE * total


def whole_size(module: nn.Module, compute: torch.dtype | None) -> int:
    """Return the bytes of a module's weights, in the precision that computes if it is not theirs, and gradients."""
    return sum(
        parameter.numel() * ((compute or parameter.dtype).itemsize + _GRADIENT * parameter.requires_grad)
        for parameter in module.parameters()
    )


def _adapter_size(model: PreTrainedModel, lora: AdapterConfig) -> int:
    return sum(
        lora.rank * (layer.in_features + layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in lora.modules
    )


def gathered_units(model: nn.Module, each: int) -> list[list[nn.Module]]:
    """Return the layers of a model in the units that several devices gather together; `each` weight has such bytes."""
    units: list[list[nn.Module]] = []
    room = 0
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            size = _size(layer) * each
            if size > room:
                units.append([])
                room = _UNIT_BYTES
            units[-1].append(layer)
            room -= size
    return units


def _gathered_size(model: PreTrainedModel, each: int) -> int:
    """Return the parameters that a device has whole at once: those beside the layers, a unit and the next."""
    units = [sum(map(_size, unit)) for unit in gathered_units(model, each)]
    return _size(model) - sum(units) + sum(sorted(units)[-2:])


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def check_memory(
    name: str, model: PreTrainedModel, dtype: str, training: TrainingConfig, reference: bool, where: torch.device
) -> None:
    """Refuse to train a model whose weights and optimiser do not fit on the devices or on the host."""
    needed = memory_for_training(model, dtype, training, reference)
    places = {"host": (needed.host, free_memory())}
    if where.type == "cuda":
        free = min(torch.cuda.mem_get_info(number)[0] for number in range(training.devices))
        places = {"GPU": (needed.device, free), **places}
    else:
        places["host"] = (needed.device * training.devices + needed.host, free_memory())
    for place, (bytes_needed, free) in places.items():
        if bytes_needed > free:
            ways = ["a smaller model", "a larger machine", *_savings(dtype, training, place)]
            raise ConfigError(
                f"`model`: to train {name} ({model.num_parameters() / 1e6:.0f} million parameters) takes about "
                f"{bytes_needed / 2**30:.2g} GiB of {place} memory and {free / 2**30:.2g} are free: "
                f"use {', '.join(ways[:-1])} or {ways[-1]}"
            )


def _savings(dtype: str, training: TrainingConfig, place: str) -> list[str]:
    """Return keys that would save memory."""
    if training.lora is not None:
        return [] if dtype == "bfloat16" else ['`engine.dtype = "bfloat16"`']
    offloads = place == "GPU" and training.devices == 1 and training.offload == "none"
    return [*(['`training.offload = "optimiser"`'] if offloads else []), "`training.lora`"]
