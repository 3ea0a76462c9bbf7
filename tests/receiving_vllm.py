"""A vLLM of two workers that only receives weights, over a group that stands for NCCL's. It is its own client."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.engine.protocol import EngineLost
from leyden.engine.vllm import nccl

SMALL_NCCL = Path(__file__).parent / "small_nccl"
WORKERS = 2


class ReceivingVllm:
    """Answers the routes by which weights arrive."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.received: list[dict[str, torch.Tensor]] = []
        """What each worker has received last."""
        self.receives = self.answers_update = True
        self.dies_at: str | None = None
        """A path at which it is gone."""
        self._communicators: list[Any] = []

    async def read(self, path: str) -> Any:
        assert path == "/get_world_size"
        return {"world_size": WORKERS}

    async def call(self, path: str, body: Any = None) -> None:
        self.paths.append(path)
        if path == self.dies_at:
            raise EngineLost("the connection to vLLM is lost")
        if path == "/init_weight_transfer_engine":
            init = body["init_info"]
            joining = [asyncio.to_thread(self._join, init, number) for number in range(WORKERS)]
            self._communicators = await asyncio.gather(*joining)
        elif path == "/update_weights":
            if not self.receives:
                await asyncio.Event().wait()
            receiving = [asyncio.to_thread(self._receive, one, body["update_info"]) for one in self._communicators]
            self.received = await asyncio.gather(*receiving)
            if not self.answers_update:
                await asyncio.Event().wait()

    def _join(self, init: dict[str, Any], number: int) -> Any:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        # older versions take no more
        assert init.keys() == {"master_address", "master_port", "rank_offset", "world_size"}
        assert init["world_size"] == 1 + WORKERS
        place = {"host": init["master_address"], "port": init["master_port"]}
        rank = init["rank_offset"] + number
        group = StatelessProcessGroup.create(**place, rank=rank, world_size=init["world_size"])
        return PyNcclCommunicator(group, torch.device("cpu"))

    def _receive(self, communicator: Any, update: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = {}
        for name, dtype, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True):
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            communicator.broadcast(found[name], src=0)
        return found


@contextmanager
def broadcasting_over_tcp() -> Iterator[None]:
    """Have the transfer over NCCL use that group, in this process and in those that it starts."""

    async def call(server: ReceivingVllm, path: str, body: Any = None) -> None:
        await server.call(path, body)

    async def read(server: ReceivingVllm, path: str) -> Any:
        return await server.read(path)

    with pytest.MonkeyPatch.context() as patch:
        for name in vllm_modules():
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(SMALL_NCCL)
        patch.setenv("PYTHONPATH", str(SMALL_NCCL))
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        patch.setattr(nccl, "call", call)
        patch.setattr(nccl, "read", read)
        try:
            yield
        finally:
            for name in vllm_modules():
                del sys.modules[name]


def vllm_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "vllm"]
