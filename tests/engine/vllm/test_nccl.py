"""Weights over NCCL, with a group and a vLLM that are scripted: no machine of ours has two devices."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from leyden.engine.protocol import EngineError
from leyden.engine.vllm import nccl
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.nccl import NcclTransfer

WEIGHTS = {"a": torch.randn(3, 2).t(), "b": torch.ones(4, dtype=torch.bfloat16)}


class ScriptedGroup:
    """Receives what is broadcast."""

    def __init__(self) -> None:
        self.received: list[torch.Tensor] = []
        self.open = threading.Event()
        self.open.set()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.open.wait()
        self.received.append(tensor)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ScriptedGroup:
    group = ScriptedGroup()
    monkeypatch.setattr(nccl, "_communicator", lambda port, size: group)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return group


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []

    async def call(client: object, path: str, body: Any = None) -> None:
        calls.append((path, body))

    async def read(client: object, path: str) -> Any:
        return {"world_size": 2}

    monkeypatch.setattr(nccl, "call", call)
    monkeypatch.setattr(nccl, "read", read)
    return calls


async def test_tensors_are_broadcast_while_vllm_receives_them(
    group: ScriptedGroup, calls: list[tuple[str, Any]]
) -> None:
    transfer = NcclTransfer()
    for version in (1, 2):
        sent = await transfer.send(None, WEIGHTS.items, version)
        assert sent == ({name: checksum(tensor) for name, tensor in WEIGHTS.items()}, 32)
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [path for path, _ in calls] == ["/init_weight_transfer_engine", *update, *update]
    init, info = calls[0][1]["init_info"], calls[2][1]["update_info"]
    assert (init["world_size"], init["rank_offset"]) == (3, 1)
    assert info == {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}
    assert [tuple(tensor.shape) for tensor in group.received] == [(2, 3), (4,)] * 2


async def test_a_broadcast_that_hangs_is_an_error(
    group: ScriptedGroup, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_LIMIT_S", 0.05)
    group.open.clear()
    with pytest.raises(EngineError, match="NCCL did not transfer the weights of version 7"):
        await NcclTransfer().send(None, WEIGHTS.items, 7)
    group.open.set()
    await asyncio.sleep(0)
