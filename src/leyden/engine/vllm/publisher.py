"""Publishes weights to a running vLLM: pause, transfer, compare checksums, resume.

Nothing is sampled or cached between pause and resume, and the prefix cache is cleared. Checksums of every tensor are
computed on both sides; if they differ, vLLM stays paused and `EngineError` is raised.
"""

import asyncio
import base64
import pickle
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from leyden.engine.broadcast import Dtypes, Sent
from leyden.engine.protocol import EngineError, LoraWeights
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.http import call, control
from leyden.engine.vllm.wire import adapter_name
from leyden.engine.weight_files import NamedTensors, WeightFiles, Weights, compare
from leyden.process.place import HERE

Deliver = Callable[[Path, str], Awaitable[str]]
"""Sends a folder, which replaces the one before of a purpose, to vLLM's machine; returns its path there."""


class AdapterTransfer:
    """Writes LoRA adapters into a folder that vLLM can read and has vLLM load them; the files of the latest ones stay.

    Each version of a policy has its own name: vLLM would read a name that is loaded again from its files at every step,
    and would find blocks of the prefix cache that the adapter of before has computed.
    """

    def __init__(self, folder: Path, deliver: Deliver = HERE.deliver) -> None:
        self._folder, self._deliver = folder, deliver
        self._loaded: dict[str, str] = {}
        """By policy."""

    async def send(
        self, client: aiohttp.ClientSession, policy: str, adapter: LoraWeights, dtype: torch.dtype, version: int
    ) -> Mapping[str, Tensor]:
        """Load an adapter and unload the policy's one before. Returns its tensors as vLLM has them."""
        served = {name: tensor.detach().to(dtype).cpu().contiguous() for name, tensor in adapter.tensors.items()}
        name, before = adapter_name(policy, version), self._loaded.get(policy)
        await asyncio.to_thread(_save_adapter, served, adapter.rank, self._folder / name)
        with suppress(EngineError):  # a vLLM that is kept over several runs may have another one of this name
            await call(client, "/v1/unload_lora_adapter", {"lora_name": name})
        path = await self._deliver(self._folder / name, f"adapter-{policy}")
        await call(client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if before is not None and before != name:
            await call(client, "/v1/unload_lora_adapter", {"lora_name": before})
            shutil.rmtree(self._folder / before, ignore_errors=True)
        self._loaded[policy] = name
        return served


def adapter_checksums(served: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor that is not all zeros: vLLM does not tell those from layers without any."""
    return {name: checksum(tensor) for name, tensor in served.items() if tensor.any()}


def _save_adapter(tensors: Mapping[str, Tensor], rank: int, path: Path) -> None:
    """Write an adapter as PEFT does. The scale is part of `lora_B`, so the scale of the adapter is 1."""
    path.mkdir(parents=True, exist_ok=True)
    modules = sorted({name.removesuffix(".weight").rpartition(".")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, path / "adapter_model.safetensors")


class Transfer(Protocol):
    """Transfers weights into vLLM's parameters."""

    async def send(self, client: aiohttp.ClientSession, weights: Weights, dtypes: Dtypes, version: int) -> Sent:
        """Write the weights, in the precisions that vLLM serves, into its parameters."""


class FileTransfer:
    """Has vLLM load files, which replicas on this machine share. Works everywhere."""

    def __init__(self, files: WeightFiles, deliver: Deliver = HERE.deliver) -> None:
        self._files, self._deliver = files, deliver

    async def send(self, client: aiohttp.ClientSession, weights: Weights, dtypes: Dtypes, version: int) -> Sent:
        """Write the files, unless another replica has, and have vLLM load them."""
        await self._files.write(lambda: _served(weights(), dtypes), version)
        async with self._files.reading() as written:
            path = {"weights_path": await self._deliver(written.folder, "weights")}
            await call(client, "/collective_rpc", {"method": "reload_weights", "kwargs": path})
            await call(client, "/collective_rpc", {"method": "leyden_repack"})
        return Sent(written.checksums, written.nbytes)


class IpcTransfer:
    """Sends vLLM handles of the weights on the GPU that both use; vLLM copies them from there.

    All tensors go in one call: vLLM keeps references to those of a layer until the layer is complete.
    """

    def __init__(self) -> None:
        self._initialised = False

    async def send(self, client: aiohttp.ClientSession, weights: Weights, dtypes: Dtypes, version: int) -> Sent:
        """Send handles; the tensors are kept alive until vLLM has copied them."""
        if not self._initialised:
            await call(client, "/init_weight_transfer_engine", {"init_info": {}})
            self._initialised = True
        contiguous = await asyncio.to_thread(lambda: [(n, one.contiguous()) for n, one in _served(weights(), dtypes)])
        update = await asyncio.to_thread(_ipc_update, contiguous)
        await call(client, "/start_weight_update")
        await call(client, "/update_weights", {"update_info": update})
        await call(client, "/finish_weight_update")
        checksums = await asyncio.to_thread(_checksums_of, contiguous)
        sent = Sent(checksums, sum(tensor.nbytes for _, tensor in contiguous))
        del contiguous
        torch.cuda.ipc_collect()
        return sent


class VllmPublisher:
    """Publishes to the vLLM at a location."""

    def __init__(self, location: str, transfer: Transfer, adapters: AdapterTransfer) -> None:
        self._location, self._transfer, self._adapters = location, transfer, adapters
        self._dtypes: dict[str, torch.dtype] = {}

    async def pause(self) -> None:
        """Abort running requests and clear the caches; new requests wait until `resume`."""
        async with control(self._location) as client:
            await call(client, "/pause", mode="abort")

    async def resume(self) -> None:
        """Let vLLM process requests again."""
        async with control(self._location) as client:
            await call(client, "/resume")

    async def sleep(self, keep_weights: bool) -> None:
        """Pause vLLM and free its KV cache and its weights, which it keeps in host memory or forgets."""
        async with control(self._location) as client:
            await call(client, "/sleep", level="1" if keep_weights else "2")

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate the weights again, with the values that were kept, or the KV cache. With both vLLM resumes."""
        async with control(self._location) as client:
            await call(client, "/wake_up", tags=what)

    async def send(self, weights: Weights, version: int) -> int:
        """Send weights to a paused vLLM, verify that it has them, and return their bytes."""
        async with control(self._location) as client:
            if not self._dtypes:
                await self._read_dtypes(client)
            sent = await self._transfer.send(client, weights, self._dtypes, version)
            reset = await call(client, "/reset_prefix_cache")  # older versions answer nothing
            if reset is not None and not reset["success"]:
                raise EngineError("vLLM did not clear its prefix cache, which has keys and values of the old weights")
            compare(sent.checksums, await _values(client), "after publishing")
            return sent.nbytes

    async def send_adapter(self, policy: str, adapter: LoraWeights, base: Weights, version: int) -> int:
        """Send the LoRA adapter of a policy that has no requests, verify that vLLM has it, and return its bytes.

        The first time, also verify that vLLM serves the weights that the adapter belongs to.
        """
        async with control(self._location) as client:
            if not self._dtypes:
                await self._read_dtypes(client)
                expected = await asyncio.to_thread(lambda: _checksums_of(_served(base(), self._dtypes)))
                compare(expected, await _values(client), "before the adapter is loaded")
            dtype = next(iter(self._dtypes.values()))
            served = await self._adapters.send(client, policy, adapter, dtype, version)
            (found,) = await _on_workers(client, "leyden_adapter_checksums", rank=adapter.rank)
            compare(await asyncio.to_thread(adapter_checksums, served), found, "after publishing")
            return sum(tensor.nbytes for tensor in served.values())

    async def _read_dtypes(self, client: aiohttp.ClientSession) -> None:
        self._dtypes = {name: getattr(torch, dtype) for name, (dtype, _) in (await _checksums(client)).items()}


async def _values(client: aiohttp.ClientSession) -> dict[str, int]:
    return {name: value for name, (_, value) in (await _checksums(client)).items()}


async def _checksums(client: aiohttp.ClientSession) -> dict[str, tuple[str, int]]:
    return merge_parts(await _on_workers(client, "leyden_checksums"))


def merge_parts(workers: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, tuple[str, int]]:
    """Join what the workers of a vLLM report of their parts: the dtype and the checksum of each whole tensor."""
    merged: dict[str, tuple[str, int]] = {}
    for name, (dtype, value, whole) in workers[0].items():
        values = [worker[name][1] for worker in workers]
        if whole and len(set(values)) > 1:
            raise EngineError(f"the workers of vLLM have different weights of {name}")
        total = sum(values) % 2**64
        merged[name] = dtype, value if whole else total - 2**64 * (total >= 2**63)
    return merged


async def _on_workers(client: aiohttp.ClientSession, method: str, **arguments: Any) -> list[dict[str, Any]]:
    """Call a method of the extension of each of vLLM's workers."""
    results: list[dict[str, Any]] = (await call(client, "/collective_rpc", {"method": method, "kwargs": arguments}))[
        "results"
    ]
    return results


def check_names(names: Collection[str], dtypes: Dtypes) -> None:
    """Raise `EngineError` unless these are the tensors that vLLM serves."""
    if unknown := [name for name in names if name not in dtypes]:
        raise EngineError(f"vLLM has no tensor {unknown[0]}: this model's weights cannot be published to it")
    if missing := dtypes.keys() - set(names):
        raise EngineError(f"the trainer has no tensor {min(missing)}, which vLLM serves")


def _served(weights: NamedTensors, dtypes: Dtypes) -> Iterator[tuple[str, Tensor]]:
    """Convert the weights to the dtypes that vLLM serves, one by one."""
    names = []
    for name, tensor in weights:
        names.append(name)
        if name not in dtypes:
            break
        yield name, tensor.detach().to(dtypes[name])
    check_names(names, dtypes)


def _checksums_of(weights: NamedTensors) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in weights}


def _ipc_update(weights: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """Build the body of `/update_weights`: for each tensor, a CUDA IPC handle by the id of its GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize()  # casts may still be running
    handles = [{_gpu(tensor): reduce_tensor(tensor)[1]} for _, tensor in weights]
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


def _gpu(tensor: Tensor) -> str:
    return str(torch.cuda.get_device_properties(tensor.device).uuid)
