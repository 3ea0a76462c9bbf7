"""Weights that are broadcast over NCCL to the workers of a vLLM on other devices. It has never run on hardware.

The process that has the weights on its GPU is rank 0 of a group with the workers of one vLLM, and needs vLLM in its
environment. Ranks that train a sharded policy gather each tensor when its turn comes.
"""

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from leyden.engine.vllm.extension.leyden_weights import checksum


class Sent(NamedTuple):
    """What was sent to an engine."""

    checksums: Mapping[str, int]
    nbytes: int


class NcclGroup:
    """The end of the group that has the weights."""

    def __init__(self, host: str, port: int, size: int, device: torch.device) -> None:
        """Wait until all workers have joined at an address of this process."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # type: ignore[import-not-found]
        from vllm.distributed.utils import StatelessProcessGroup  # type: ignore[import-not-found]

        group = StatelessProcessGroup.create(host=host, port=port, rank=0, world_size=size)
        self._communicator: Any = PyNcclCommunicator(group, device=device)

    def broadcast(self, tensors: Iterable[tuple[str, Tensor]]) -> Sent:
        """Broadcast one tensor after the other."""
        checksums, nbytes = dict[str, int](), 0
        for name, tensor in tensors:
            whole = tensor.contiguous()
            self._communicator.broadcast(whole, src=0)
            checksums[name] = checksum(whole)
            nbytes += whole.nbytes
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Sent(checksums, nbytes)


def free_port(host: str) -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind((host, 0))
        port: int = free.getsockname()[1]
        return port


@runtime_checkable
class Broadcaster(Protocol):
    """Tensors of a model, by their Hugging Face names, with a process that broadcasts them."""

    async def find_address(self) -> tuple[str, int]:
        """Return an address of that process and a free port there, which names the group that meets at it."""

    async def join(self, address: tuple[str, int], size: int) -> None:
        """Make the group of so many members, when all have joined."""

    async def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each tensor, in the order in which they are broadcast."""

    async def broadcast(self, port: int, dtypes: Mapping[str, torch.dtype]) -> Sent:
        """Broadcast all tensors to a group, each in its precision."""
