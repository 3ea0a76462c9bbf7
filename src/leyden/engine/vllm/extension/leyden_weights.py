"""Checksums of model weights, computed in the same way by the trainer and inside vLLM's worker.

vLLM imports `WorkerExtension` from this file's folder (`--worker-extension-cls`), so the file imports nothing of
Leyden. vLLM fuses projections, pads the vocabulary, divides tensors over devices, and on a CPU repacks linear weights;
the worker undoes all of that and reports each tensor, or its part of it, under its name in the checkpoint.
"""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

TRANSFER_VARIABLE = "LEYDEN_WEIGHT_TRANSFER"
"""How the trainer sends weights to this vLLM: `ipc`, `nccl` or `files`."""
_IPC_ENGINE = "vllm.distributed.weight_transfer.ipc_engine"
_CHUNK, _CPU_CHUNK = 1 << 22, 1 << 15
"""Elements that are summed at once: the 64-bit temporaries of a whole embedding would not fit beside a model, and on a
CPU those of more elements do not fit into its caches."""
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: torch.Tensor, row: int = 0, column: int = 0, width: int | None = None) -> int:
    """Sum the bits of the elements, each times a factor of its position, modulo 2**64; 0.0 and -0.0 count as equal.

    A part of a tensor of `width` columns counts at its place in it: the sums of all parts add up to that of the whole.
    """
    columns = tensor.shape[-1] if tensor.ndim else 1
    flat = (tensor + 0).contiguous().view(-1)  # -0.0 + 0 is 0.0: repacking does not keep the sign
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    chunk = _CPU_CHUNK if bits.device.type == "cpu" else _CHUNK
    for start in range(0, bits.numel(), chunk):
        part = bits[start : start + chunk].to(torch.int64)
        positions = torch.arange(start, start + part.numel(), dtype=torch.int64, device=bits.device)
        if row or column or width is not None:
            positions = (positions // columns + row) * (width or columns) + positions % columns + column
        factors = (positions * 2 + 1) * _FACTOR
        total += ((part + 1) * (factors ^ (factors >> 29))).sum()
    return int(total.item())


class WorkerExtension:
    """Methods that vLLM adds to its worker, for `/collective_rpc`."""

    model_runner: Any

    def leyden_checksums(self) -> dict[str, list[Any]]:
        """Return dtype, checksum and whether this worker has it all, for each weight by its name in the checkpoint."""
        return {
            part.name: [
                str(part.tensor.dtype).removeprefix("torch."),
                checksum(part.tensor, part.row, part.column, part.width) if part.counts else 0,
                part.whole,
            ]
            for part in _checkpoint_tensors(self.model_runner.get_model())
        }

    def leyden_adapter_checksums(self, rank: int) -> dict[str, int]:
        """Return the checksums of the matrices that are not all zeros of the LoRA adapter that was loaded last.

        Adapters have ascending numbers, and each has a slot in the layers.
        """
        model = self.model_runner.get_model()
        loaded = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        slot = max(range(len(loaded)), key=lambda index: loaded[index] or 0)
        packed = getattr(model, "packed_modules_mapping", None) or {}
        sums = {}
        for path, module in model.named_modules():
            if not isinstance(getattr(module, "lora_a_stacked", None), tuple):  # those of embeddings are not
                continue
            parent, _, last = path.rpartition(".")
            names = packed.get(last, [last]) if len(module.lora_a_stacked) > 1 else [last]
            for name, a, b in zip(names, module.lora_a_stacked, module.lora_b_stacked, strict=True):
                for kind, matrix in (("lora_A", a[slot, 0, :rank]), ("lora_B", b[slot, 0, :, :rank])):
                    if matrix.any():
                        sums[f"{parent}.{name}.{kind}.weight"] = checksum(matrix)
        return sums

    def leyden_repack(self) -> None:
        """Repack tied weights: after a reload vLLM's CPU backend still multiplies by the old ones."""
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)


class WeightPart(NamedTuple):
    """What a worker has of a tensor of the checkpoint."""

    name: str
    tensor: torch.Tensor
    row: int = 0
    column: int = 0
    width: int | None = None
    whole: bool = True
    counts: bool = True
    """False if another worker has the same part."""


def _checkpoint_tensors(model: Any) -> Iterator[WeightPart]:
    packed = getattr(model, "packed_modules_mapping", None) or {}
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.rpartition(".")
        module = modules[path]
        name = name.replace(".base_layer.", ".")  # the layer that a LoRA layer wraps
        parent, _, last = path.removesuffix(".base_layer").rpartition(".")
        tensor = _in_use(module, parameter) if kind == "weight" else parameter
        if parameter.data_ptr() in seen and tensor is parameter:  # tied to one that was reported
            continue
        if parameter.numel():
            seen.add(parameter.data_ptr())
        divided = getattr(module, "tp_size", 1) > 1
        if getattr(module, "org_vocab_size", None) is not None:
            rows = module.shard_indices
            first, end = rows.org_vocab_start_index, rows.org_vocab_end_index
            yield WeightPart(name, tensor[: end - first], row=first, whole=not divided)
        elif last in packed and getattr(module, "output_sizes", None):
            names = [f"{parent}.{part}.{kind}" if parent else f"{part}.{kind}" for part in packed[last]]
            yield from _output_parts(module, tensor, names)
        elif divided and getattr(module, "input_size_per_partition", 0) == getattr(module, "input_size", None):
            yield from _output_parts(module, tensor, [name])
        elif divided and kind == "weight" and hasattr(module, "input_size_per_partition"):
            first = module.tp_rank * module.input_size_per_partition
            yield WeightPart(name, tensor, column=first, width=module.input_size, whole=False)
        else:
            yield WeightPart(name, tensor)


def _output_parts(module: Any, tensor: torch.Tensor, names: list[str]) -> Iterator[WeightPart]:
    """Divide a tensor by its rows, of which workers have equal shares; they may have the same keys and values."""
    sizes = list(module.output_partition_sizes)
    for number, (name, part) in enumerate(zip(names, tensor.split(sizes), strict=True)):
        copies = getattr(module, "num_kv_head_replicas", 1) if number else 1
        first = module.tp_rank // copies * sizes[number]
        place = {"row": first} if part.ndim > 1 else {"column": first}
        yield WeightPart(name, part, **place, whole=module.tp_size == 1, counts=module.tp_rank % copies == 0)


@torch.no_grad()
def _in_use(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight that the module multiplies by; on a CPU that is a repacked copy, read by a product with I."""
    if not hasattr(module, "cpu_linear"):
        return weight
    size = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    product = module.cpu_linear(torch.eye(size, dtype=weight.dtype), weight, None).t()
    return weight if weight.numel() and torch.equal(weight, product) else product


def _import_ipc() -> None:
    """Import vLLM's IPC engine before vLLM does.

    In vLLM 0.25 and 0.26 the engine imports Ray, which only a trainer that sends weights by it needs, and which vLLM
    does not install. vLLM imports the engine whatever plugins it has, so an empty module stands for Ray meanwhile.
    """
    try:
        import_module(_IPC_ENGINE)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        sys.modules["ray"] = ModuleType("ray")
        import_module(_IPC_ENGINE)
        del sys.modules["ray"]


if os.environ.get(TRANSFER_VARIABLE) == "ipc":
    _import_ipc()
