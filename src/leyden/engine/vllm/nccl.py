"""Sends weights to a vLLM on other devices than the trainer's over NCCL. It has never run on hardware.

NCCL has no time limit, so the sender has one for each tensor. It is waited for also if vLLM has failed: ranks that
gather tensors can do nothing else until then.
"""

import asyncio
import os
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
from torch import Tensor

from leyden.background import running
from leyden.engine.broadcast import Broadcaster, Dtypes, NcclGroups, Sent
from leyden.engine.protocol import EngineError
from leyden.engine.vllm.http import call, read
from leyden.engine.vllm.publisher import check_names
from leyden.engine.weight_files import Weights

T = TypeVar("T")
_HOST = "127.0.0.1"
_LIMIT_S = 60.0
"""How long vLLM may take to answer once it has the weights."""


class NcclTransfer:
    """Sends weights to one vLLM; a vLLM that is restarted needs another."""

    def __init__(self, engine: str, groups: NcclGroups) -> None:
        """`engine` is a name that the vLLM keeps when it is restarted; `groups` are those of this process."""
        self._engine, self._groups = engine, groups
        self._joined = False

    async def send(self, client: aiohttp.ClientSession, weights: Weights, dtypes: Dtypes, version: int) -> Sent:
        """Broadcast one tensor after the other while vLLM receives them."""
        tensors = weights()
        if isinstance(tensors, Broadcaster):
            sender: Broadcaster = tensors
        else:
            sender = _OwnTensors(await asyncio.to_thread(dict, tensors), self._groups)
        try:
            if not self._joined:
                await self._join(client, sender)
                self._joined = True
            return await self._send(client, sender, dtypes)
        except TimeoutError:
            raise EngineError(f"vLLM did not answer in {_LIMIT_S:.0f} s that it has weights {version}") from None

    async def _join(self, client: aiohttp.ClientSession, sender: Broadcaster) -> None:
        size = 1 + int((await read(client, "/get_world_size"))["world_size"])
        host, port = await sender.listen(self._engine)
        init = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
        answer = call(client, "/init_weight_transfer_engine", {"init_info": init})
        await _wait_both(answer, sender.join(self._engine, size))

    async def _send(self, client: aiohttp.ClientSession, sender: Broadcaster, dtypes: Dtypes) -> Sent:
        shapes = await sender.shapes()
        check_names(shapes, dtypes)
        update = {
            "names": [*shapes],
            "dtype_names": [str(dtypes[name]).removeprefix("torch.") for name in shapes],
            "shapes": [list(shape) for shape in shapes.values()],
        }
        async with asyncio.timeout(_LIMIT_S):
            await call(client, "/start_weight_update")
        answer = call(client, "/update_weights", {"update_info": update})
        sent = await _wait_both(answer, sender.broadcast(self._engine, dtypes))
        async with asyncio.timeout(_LIMIT_S):
            await call(client, "/finish_weight_update")
        return sent


class _OwnTensors:
    """Tensors of this process, for a vLLM of this machine."""

    def __init__(self, tensors: Mapping[str, Tensor], groups: NcclGroups) -> None:
        self._tensors, self._groups = tensors, groups

    async def listen(self, engine: str) -> tuple[str, int]:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return self._groups.listen(engine, _HOST)

    async def join(self, engine: str, size: int) -> None:
        device = next(iter(self._tensors.values())).device
        await asyncio.to_thread(self._groups.join, engine, size, device)

    async def shapes(self) -> Mapping[str, Sequence[int]]:
        return {name: list(tensor.shape) for name, tensor in self._tensors.items()}

    async def broadcast(self, engine: str, dtypes: Dtypes) -> Sent:
        tensors = ((name, tensor.detach()) for name, tensor in self._tensors.items())
        end = (await asyncio.to_thread(self._groups.broadcast, {engine: dtypes}, tensors))[engine]
        if isinstance(end, EngineError):
            raise end
        return end


async def _wait_both(answer: Coroutine[Any, Any, Any], sending: Awaitable[T]) -> T:
    """Return what a sender returns, when vLLM has answered as well. If both fail, vLLM's error is the cause."""
    async with running(answer) as (answering,):
        try:
            sent = await sending
            async with asyncio.timeout(_LIMIT_S):
                await answering
            return sent
        except EngineError:
            if answering.done():
                await answering
            raise
