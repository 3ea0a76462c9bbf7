"""LoRA adapters in vLLM: each version is an adapter with its own name, loaded from files beside weights that stay.

A name that is loaded again would be read from its files at every step, and would find blocks of the prefix cache that
the adapter of before has computed.
"""

import asyncio
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from leyden.engine.protocol import EngineError, LoraWeights
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.http import call
from leyden.engine.vllm.wire import adapter_name

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM reserves memory for."""


def adapter_arguments(rank: int) -> tuple[str, ...]:
    """Return the arguments with which vLLM's server takes one adapter of this rank."""
    reserved = next((one for one in _RANKS if one >= rank), rank)
    return ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", str(reserved))


class AdapterTransfer:
    """Writes adapters into a folder that vLLM can read and has vLLM load them; the files of the latest one stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: str | None = None

    async def send(
        self, client: aiohttp.ClientSession, adapter: LoraWeights, dtype: torch.dtype, version: int
    ) -> Mapping[str, Tensor]:
        """Load an adapter and unload the one before. Returns its tensors as vLLM has them."""
        served = {name: tensor.detach().to(dtype).cpu().contiguous() for name, tensor in adapter.tensors.items()}
        name = adapter_name(version)
        await asyncio.to_thread(_save, served, adapter.rank, self._folder / name)
        with suppress(EngineError):  # a vLLM that is kept over several runs may have another one of this name
            await call(client, "/v1/unload_lora_adapter", {"lora_name": name})
        await call(client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self._folder / name)})
        if self._loaded is not None and self._loaded != name:
            await call(client, "/v1/unload_lora_adapter", {"lora_name": self._loaded})
            shutil.rmtree(self._folder / self._loaded, ignore_errors=True)
        self._loaded = name
        return served


def adapter_checksums(served: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor that is not all zeros: vLLM does not tell those from layers without any."""
    return {name: checksum(tensor) for name, tensor in served.items() if tensor.any()}


def _save(tensors: Mapping[str, Tensor], rank: int, path: Path) -> None:
    """Write an adapter as PEFT does. The scale is part of `lora_B`, so that of the adapter is 1."""
    path.mkdir(parents=True, exist_ok=True)
    modules = sorted({name.removesuffix(".weight").rpartition(".")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, path / "adapter_model.safetensors")
