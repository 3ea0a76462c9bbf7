"""Sends weights to a vLLM on other devices than the trainer's over NCCL. It has never run on hardware.

NCCL has no time limit: what takes longer than a minute is an error. A thread of this process that waits for NCCL may be
left behind; ranks are ended.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import aiohttp
import torch
from torch import Tensor

from leyden.engine.broadcast import Broadcaster, NcclGroup, Sent, free_port
from leyden.engine.protocol import EngineError
from leyden.engine.vllm.http import call, read
from leyden.engine.vllm.publisher import check_names
from leyden.engine.weight_files import NamedTensors

T = TypeVar("T")
_HOST = "127.0.0.1"
_LIMIT_S = 60.0


class NcclTransfer:
    """Sends weights to one vLLM; a vLLM that is restarted needs another."""

    def __init__(self) -> None:
        self._groups: dict[int, NcclGroup] = {}
        """Of this process, by their ports."""
        self._port: int | None = None

    async def send(
        self,
        client: aiohttp.ClientSession,
        weights: Callable[[], NamedTensors],
        dtypes: Mapping[str, torch.dtype],
        version: int,
    ) -> Sent:
        """Broadcast one tensor after the other while vLLM receives them."""
        tensors = weights()
        sender = tensors if isinstance(tensors, Broadcaster) else await self._own(tensors)
        try:
            async with asyncio.timeout(_LIMIT_S):
                if self._port is None:
                    self._port = await _join(client, sender)
                return await _send(client, sender, self._port, dtypes)
        except TimeoutError:
            raise EngineError(f"NCCL did not transfer the weights of version {version} in {_LIMIT_S:.0f} s") from None

    async def _own(self, tensors: NamedTensors) -> "_OwnTensors":
        return _OwnTensors(await asyncio.to_thread(lambda: dict(tensors)), self._groups)


class _OwnTensors:
    """Tensors of this process."""

    def __init__(self, tensors: Mapping[str, Tensor], groups: dict[int, NcclGroup]) -> None:
        self._tensors, self._groups = tensors, groups

    async def find_address(self) -> tuple[str, int]:
        return _HOST, free_port(_HOST)

    async def join(self, address: tuple[str, int], size: int) -> None:
        host, port = address
        device = next(iter(self._tensors.values())).device
        self._groups[port] = await _on_own_thread(lambda: NcclGroup(host, port, size, device))

    async def shapes(self) -> Mapping[str, Sequence[int]]:
        return {name: list(tensor.shape) for name, tensor in self._tensors.items()}

    async def broadcast(self, port: int, dtypes: Mapping[str, torch.dtype]) -> Sent:
        cast = ((name, tensor.detach().to(dtypes[name])) for name, tensor in self._tensors.items())
        return await _on_own_thread(lambda: self._groups[port].broadcast(cast))


async def _join(client: aiohttp.ClientSession, sender: Broadcaster) -> int:
    """Make the group of the sender and vLLM's workers; return its port."""
    workers = int((await read(client, "/get_world_size"))["world_size"])
    host, port = await sender.find_address()
    size = 1 + workers
    init = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size, "packed": False}
    await asyncio.gather(
        call(client, "/init_weight_transfer_engine", {"init_info": init}), sender.join((host, port), size)
    )
    return port


async def _send(
    client: aiohttp.ClientSession, sender: Broadcaster, port: int, dtypes: Mapping[str, torch.dtype]
) -> Sent:
    shapes = await sender.shapes()
    check_names(shapes, dtypes)
    update = {
        "names": [*shapes],
        "dtype_names": [str(dtypes[name]).removeprefix("torch.") for name in shapes],
        "shapes": [list(shape) for shape in shapes.values()],
    }
    await call(client, "/start_weight_update")
    _, sent = await asyncio.gather(
        call(client, "/update_weights", {"update_info": update}), sender.broadcast(port, dtypes)
    )
    await call(client, "/finish_weight_update")
    return sent


async def _on_own_thread(work: Callable[[], T]) -> T:
    """Run what may never return on a thread that does not keep the process alive."""
    done: Future[T] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()  # so that a waiter that gives up does not cancel it
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="leyden-nccl", daemon=True).start()
    return await asyncio.wrap_future(done)
