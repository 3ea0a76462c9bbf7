"""Weights that are broadcast over NCCL to the workers of a vLLM on other devices. It has never run on hardware.

The process that has the weights on its GPU is rank 0 of a group with the workers of each vLLM, and needs vLLM in its
environment. Ranks that train a sharded policy gather each tensor when its turn comes.
"""

import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.extension.leyden_weights import checksum

JOIN_LIMIT_S = 60.0
Dtypes = Mapping[str, torch.dtype]
"""By tensor, the precision in which an engine serves it."""


class Sent(NamedTuple):
    """What was sent to an engine."""

    checksums: Mapping[str, int]
    nbytes: int


class _Group(NamedTuple):
    """One with the workers of an engine."""

    communicator: Any
    stream: torch.cuda.Stream | None
    """On a GPU, one of its own: an engine that takes nothing keeps no other from taking the same tensor."""


class NcclGroups:
    """The groups of this process, one with the workers of each engine. Errors are `EngineError`."""

    def __init__(self, limit_s: float = JOIN_LIMIT_S) -> None:
        """Workers have so long to join, and half of it to take a tensor: NCCL itself waits without end."""
        self._limit_s = limit_s
        self._listening: dict[str, socket.socket] = {}
        self._groups: dict[str, _Group] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}

    def listen(self, engine: str, host: str) -> tuple[str, int]:
        """Return the address of this process at which the workers of an engine can join."""
        self._listening[engine] = listening = socket.create_server((host, 0))
        return host, int(listening.getsockname()[1])

    def join(self, engine: str, size: int, device: torch.device) -> None:
        """Make the group of so many members when all have joined. It replaces the one that the engine had before."""
        if (earlier := self._groups.pop(engine, None)) is not None:
            earlier.communicator.destroy()
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
        if device.type == "cuda" and engine not in self._streams:  # torch has 32: an engine that is restarted keeps it
            self._streams[engine] = torch.cuda.Stream(device)
        self._groups[engine] = _Group(made[0], self._streams.get(engine))

    def broadcast(
        self, engines: Mapping[str, Dtypes], tensors: Iterable[tuple[str, Tensor]]
    ) -> dict[str, Sent | EngineError]:
        """Broadcast one tensor after the other, each to all engines at once, in the precisions that they serve.

        Returns for each engine what was sent, or why it did not take a tensor, which keeps nothing from the others.
        All tensors are read even if nobody takes them: other processes may have to take part in gathering them.
        """
        refused: dict[str, EngineError] = {}
        checksums: dict[str, dict[str, int]] = {engine: {} for engine in engines}
        nbytes = dict.fromkeys(engines, 0)
        with ThreadPoolExecutor(max(1, len(engines)), "leyden-nccl") as threads:
            for name, tensor in tensors:
                taking = [engine for engine in engines if engine not in refused]
                dtypes = [engines[engine][name] for engine in taking]
                served = {dtype: tensor.to(dtype).contiguous() for dtype in {*dtypes}}
                # which waits until the GPU has computed them: they are sent on other streams
                sums = {dtype: checksum(one) for dtype, one in served.items()}
                reasons = threads.map(self._why_not_taken, taking, [served[dtype] for dtype in dtypes])
                for engine, dtype, why in zip(taking, dtypes, reasons, strict=True):
                    if why is not None:
                        refused[engine] = EngineError(f"the workers of vLLM did not take {name} over NCCL: {why}")
                    checksums[engine][name] = sums[dtype]
                    nbytes[engine] += served[dtype].nbytes
        return {engine: refused.get(engine) or Sent(checksums[engine], nbytes[engine]) for engine in engines}

    def _why_not_taken(self, engine: str, tensor: Tensor) -> str | None:
        """Broadcast a tensor. If that fails or takes too long the group is aborted, which all its members notice."""
        if (group := self._groups.get(engine)) is None:
            return "its group was aborted"
        found: list[str] = []

        def abort(why: str) -> None:
            found.append(why)
            group.communicator.destroy()

        watch = threading.Timer(self._limit_s / 2, abort, [f"it waited for {self._limit_s / 2:.3g} s"])
        watch.daemon = True
        watch.start()
        try:
            if group.stream is None:
                group.communicator.broadcast(tensor, src=0)
            else:
                with torch.cuda.device(tensor.device):
                    group.communicator.broadcast(tensor, src=0, stream=group.stream)
                group.stream.synchronize()
        except RuntimeError as error:
            if not found:
                abort(str(error))
        finally:
            watch.cancel()
        if not found:
            return None
        del self._groups[engine]
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

    async def broadcast(self, engine: str, dtypes: Dtypes) -> Sent:
        """Broadcast all tensors to an engine, each in its precision."""
