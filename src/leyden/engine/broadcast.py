"""Weights that are broadcast over NCCL to the workers of a vLLM on other devices. It has never run on hardware.

The process that has the weights on its GPU is rank 0 of a group with the workers of each vLLM, and needs vLLM in its
environment. Ranks that train a sharded policy gather each tensor when its turn comes.
"""

import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.extension.leyden_weights import checksum

JOIN_LIMIT_S = 60.0


class Sent(NamedTuple):
    """What was sent to an engine."""

    checksums: Mapping[str, int]
    nbytes: int


class NcclGroups:
    """The groups of this process, one with the workers of each engine. Errors are `EngineError`."""

    def __init__(self, limit_s: float = JOIN_LIMIT_S) -> None:
        """Workers have so long to join, and half of it to take a tensor: NCCL itself waits without end."""
        self._limit_s = limit_s
        self._listening: dict[str, socket.socket] = {}
        self._communicators: dict[str, Any] = {}

    def listen(self, engine: str, host: str) -> tuple[str, int]:
        """Return the address of this process at which the workers of an engine can join."""
        self._listening[engine] = listening = socket.create_server((host, 0))
        return host, int(listening.getsockname()[1])

    def join(self, engine: str, size: int, device: torch.device) -> None:
        """Make the group of so many members when all have joined. It replaces the one that the engine had before."""
        if (earlier := self._communicators.pop(engine, None)) is not None:
            earlier.destroy()
        try:
            from vllm.distributed.device_communicators.pynccl import (  # type: ignore[import-not-found]
                PyNcclCommunicator,
            )
            from vllm.distributed.utils import StatelessProcessGroup  # type: ignore[import-not-found]
        except ImportError as error:
            raise EngineError(f"`engine.transfer`: NCCL needs vLLM in the trainer's environment ({error})") from error
        listening, made = self._listening.pop(engine), list[Any]()

        def make() -> None:
            host, port = listening.getsockname()[:2]
            seconds = max(1, int(0.8 * self._limit_s))  # so that it is this thread that says what is missing
            place = {"host": host, "port": port, "listen_socket": listening}
            try:
                group = StatelessProcessGroup.create(rank=0, world_size=size, store_timeout=seconds, **place)
                made.append(PyNcclCommunicator(group, device=device))
            except Exception as error:
                made.append(EngineError(f"the NCCL group of an engine was not made: {error}"))

        # NCCL has no limit: this thread may be left behind. And vLLM changes the CUDA stream of its thread
        making = threading.Thread(target=make, name="leyden-nccl", daemon=True)
        making.start()
        making.join(self._limit_s)
        if not made:
            raise EngineError(f"the workers of vLLM did not join its NCCL group in {self._limit_s:.0f} s")
        if isinstance(made[0], EngineError):
            raise made[0]
        if made[0].disabled:
            raise EngineError(
                "vLLM in the trainer's environment finds no NCCL library: set VLLM_NCCL_SO_PATH, unset "
                "VLLM_DISABLE_PYNCCL, or leave out `engine.transfer`"
            )
        self._communicators[engine] = made[0]

    def broadcast(self, engine: str, tensors: Iterable[tuple[str, Tensor]]) -> Sent:
        """Broadcast one tensor after the other to an engine. All are read, also those after one that it did not take:
        other processes may have to take part in gathering them."""
        checksums, nbytes, refusal = dict[str, int](), 0, None
        for name, tensor in tensors:
            if refusal is None:
                whole = tensor.contiguous()
                if (why := self._why_not_taken(engine, whole)) is not None:
                    refusal = f"the workers of vLLM did not take {name} over NCCL: {why}"
                    continue
                checksums[name] = checksum(whole)
                nbytes += whole.nbytes
        if refusal is not None:
            raise EngineError(refusal)
        return Sent(checksums, nbytes)

    def _why_not_taken(self, engine: str, tensor: Tensor) -> str | None:
        """Broadcast a tensor. If that fails or takes too long the group is aborted, which all its members notice."""
        if (communicator := self._communicators.get(engine)) is None:
            return "its group was aborted"
        found: list[str] = []

        def abort(why: str) -> None:
            found.append(why)
            communicator.destroy()

        watch = threading.Timer(self._limit_s / 2, abort, [f"it waited for {self._limit_s / 2:.3g} s"])
        watch.daemon = True
        watch.start()
        try:
            if tensor.device.type == "cuda":
                stream = torch.cuda.current_stream(tensor.device)
                communicator.broadcast(tensor, src=0, stream=stream)
                stream.synchronize()
            else:
                communicator.broadcast(tensor, src=0)
        except RuntimeError as error:
            if not found:
                abort(str(error))
        finally:
            watch.cancel()
        if not found:
            return None
        del self._communicators[engine]
        return found[0]


@runtime_checkable
class Broadcaster(Protocol):
    """Tensors of a model, by their Hugging Face names, in a process that can broadcast them to engines."""

    async def listen(self, engine: str) -> tuple[str, int]:
        """Return the address at which the workers of an engine can join that process."""

    async def join(self, engine: str, size: int) -> None:
        """Make the group of so many members when all have joined. It replaces the one that the engine had before."""

    async def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each tensor, in the order in which they are broadcast."""

    async def broadcast(self, engine: str, dtypes: Mapping[str, torch.dtype]) -> Sent:
        """Broadcast all tensors to an engine, each in its precision."""
