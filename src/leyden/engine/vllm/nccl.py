"""Broadcasts weights over NCCL to a vLLM on other devices than the trainer's. It has never run on hardware.

The trainer is rank 0 of a group with the workers of one vLLM, so it needs vLLM in its own environment. NCCL has no time
limit: its calls run on a thread that may be left behind, and what takes longer than a minute is an error.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp
import torch

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.http import call, read
from leyden.engine.vllm.publisher import Sent
from leyden.engine.weight_files import NamedTensors

T = TypeVar("T")
_HOST = "127.0.0.1"
_LIMIT_S = 60.0


class NcclTransfer:
    """Sends weights to one vLLM; a vLLM that is restarted needs another."""

    def __init__(self) -> None:
        self._communicator: Any = None

    async def send(self, client: aiohttp.ClientSession, weights: Callable[[], NamedTensors], version: int) -> Sent:
        """Broadcast one tensor after the other while vLLM receives them."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                if self._communicator is None:
                    self._communicator = await _join(client)
                return await self._send(client, weights)
        except TimeoutError:
            raise EngineError(f"NCCL did not transfer the weights of version {version} in {_LIMIT_S:.0f} s") from None

    async def _send(self, client: aiohttp.ClientSession, weights: Callable[[], NamedTensors]) -> Sent:
        tensors = await asyncio.to_thread(lambda: [(name, one.contiguous()) for name, one in weights()])
        update = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }

        def broadcast() -> None:
            for _, tensor in tensors:
                self._communicator.broadcast(tensor, src=0)
            torch.cuda.synchronize()

        await call(client, "/start_weight_update")
        await asyncio.gather(call(client, "/update_weights", {"update_info": update}), _on_own_thread(broadcast))
        await call(client, "/finish_weight_update")
        checksums = await asyncio.to_thread(lambda: {name: checksum(tensor) for name, tensor in tensors})
        return Sent(checksums, sum(tensor.nbytes for _, tensor in tensors))


async def _join(client: aiohttp.ClientSession) -> Any:
    """Make the group of the trainer and vLLM's workers; return the trainer's end."""
    workers = int((await read(client, "/get_world_size"))["world_size"])
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    size = 1 + workers
    init = {"master_address": _HOST, "master_port": port, "rank_offset": 1, "world_size": size, "packed": False}
    _, communicator = await asyncio.gather(
        call(client, "/init_weight_transfer_engine", {"init_info": init}),
        _on_own_thread(lambda: _communicator(port, size)),
    )
    return communicator


def _communicator(port: int, size: int) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # type: ignore[import-not-found]
    from vllm.distributed.utils import StatelessProcessGroup  # type: ignore[import-not-found]

    group = StatelessProcessGroup.create(host=_HOST, port=port, rank=0, world_size=size)
    return PyNcclCommunicator(group, device=torch.cuda.current_device())


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
