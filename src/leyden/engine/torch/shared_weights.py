"""One copy of the weights, which engine processes on the trainer's device map: memory of a GPU, or a file on a CPU.

A version is written when nobody reads the one before, and read only between two versions. On a GPU the copy is passed
on by CUDA IPC, so that publishing moves nothing over the host.
"""

import asyncio
import base64
import os
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.weight_files import NamedTensors, Weights, WrittenWeights, read_weights
from leyden.process.temporary import TemporaryFolder

_ALIGNMENT = 256
"""Tensors begin at multiples of this many bytes."""
_LAYOUT, _VALUES = "layout.json", "values"


class SharedTensor(Struct, frozen=True):
    """Where a tensor is in the copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def of(self, copy: Tensor) -> Tensor:
        """Return the tensor in a copy."""
        values = copy[self.begin : self.begin + self.nbytes]
        return values.view(getattr(torch, self.dtype)).view(self.shape)


class SharedLayout(Struct, frozen=True):
    """What a reader needs to map the copy."""

    tensors: list[SharedTensor]
    nbytes: int
    handle: str | None
    """Of the memory of a GPU, pickled; None: the values are a file."""


class SharedWeights:
    """The trainer's side."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder("weights")
        self._changing = asyncio.Lock()
        """Held while a version is written, and while a reader begins."""
        self._readers = 0
        self._unread = asyncio.Event()
        self._unread.set()
        self._copy: Tensor | None = None
        self._tensors: list[SharedTensor] = []
        self._latest: WrittenWeights | None = None

    def close(self) -> None:
        """Free the copy."""
        self._copy = None
        self._folder.close()

    async def write(self, tensors: Weights, version: int) -> WrittenWeights:
        """Write the weights of a version once nobody reads, unless the latest ones are of this version."""
        async with self._changing:
            if self._latest is None or self._latest.version != version:
                await self._unread.wait()
                writing = asyncio.create_task(asyncio.to_thread(self._write, tensors(), version))
                try:
                    self._latest = await asyncio.shield(writing)
                finally:  # a thread that was not waited for still writes: nobody may read before it has ended
                    await asyncio.wait({writing})
            return self._latest

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[WrittenWeights]:
        """Return the latest weights, which stay as they are within this context."""
        async with self._changing:
            assert self._latest is not None
            self._readers += 1
            self._unread.clear()
        try:
            yield self._latest
        finally:
            self._readers -= 1
            if not self._readers:
                self._unread.set()

    def _write(self, named: NamedTensors, version: int) -> WrittenWeights:
        tensors = [(name, tensor.detach()) for name, tensor in named]
        if self._copy is None:
            self._copy = self._allocate(tensors)
        views = [place.of(self._copy) for place in self._tensors]
        torch._foreach_copy_(views, [tensor for _, tensor in tensors])
        checksums = {name: checksum(tensor) for name, tensor in tensors}
        if self._copy.is_cuda:
            torch.cuda.synchronize(self._copy.device)
        return WrittenWeights(self._folder.path, version, checksums, sum(place.nbytes for place in self._tensors))

    def _allocate(self, tensors: list[tuple[str, Tensor]]) -> Tensor:
        """Place the tensors one after another; write what a reader needs."""
        places, end = [], 0
        for name, tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append(SharedTensor(name, dtype, tuple(tensor.shape), end, tensor.nbytes))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        device, handle = tensors[0][1].device, None
        try:
            if device.type == "cuda":
                copy = torch.empty(end, dtype=torch.uint8, device=device)
                handle = _export(copy)
            else:
                _reserve(self._folder.path, end)
                copy = _map_file(self._folder.path, end)
        except (RuntimeError, OSError) as error:
            raise EngineError(f"no copy of the weights for the engine's process, {end:,} bytes: {error}") from error
        (self._folder.path / _LAYOUT).write_bytes(msgspec.json.encode(SharedLayout(places, end, handle)))
        self._tensors = places
        return copy


def read_any_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder: those of a copy that is shared, or of files."""
    if not (folder / _LAYOUT).is_file():
        yield from read_weights(folder)
        return
    tensors, copy = _mapped(folder)
    for place in tensors:
        yield place.name, place.of(copy)


@cache
def _mapped(folder: Path) -> tuple[list[SharedTensor], Tensor]:
    """Map a copy, which stays mapped: the trainer writes all versions into it."""
    layout = msgspec.json.decode((folder / _LAYOUT).read_bytes(), type=SharedLayout)
    copy = _map_file(folder, layout.nbytes) if layout.handle is None else _import(layout.handle)
    return layout.tensors, copy


def _reserve(folder: Path, nbytes: int) -> None:
    """Have room for the file: without, writing to its map would end the process."""
    with (folder / _VALUES).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def _map_file(folder: Path, nbytes: int) -> Tensor:
    return torch.from_file(str(folder / _VALUES), shared=True, size=nbytes, dtype=torch.uint8)


def _export(copy: Tensor) -> str:
    from torch.multiprocessing.reductions import reduce_tensor

    return base64.b64encode(pickle.dumps(reduce_tensor(copy)[1])).decode()


def _import(handle: str) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    copy: Tensor = rebuild_cuda_tensor(*pickle.loads(base64.b64decode(handle)))
    return copy
