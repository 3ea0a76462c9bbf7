"""Engines of other devices are sent the weights of a sharded policy by rank 0, all at once; ranks outlive engines."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
import torch
from receiving_vllm import ReceivingVllm

from leyden.engine.broadcast import Broadcaster, NcclGroups, Sent
from leyden.engine.protocol import EngineError, EngineLost
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.nccl import NcclTransfer
from leyden.learner.ranks import gathered
from leyden.learner.ranks.gathered import GatheredWeights
from leyden.learner.ranks.processes import RankProcesses


async def check_broadcasts(
    ranks: RankProcesses, weights: GatheredWeights, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broadcast the weights, which are those of a model, to engines that take them, stall, die and are restarted."""
    monkeypatch.setattr(gathered, "_TOGETHER_S", 30.0)  # busy machines too
    dtypes = {name: torch.float32 if "norm" in name else torch.bfloat16 for name, _ in model.named_parameters()}
    expected = {name: tensor.detach().to(dtypes[name]) for name, tensor in model.named_parameters()}
    assert isinstance(weights.tensors(), Broadcaster)
    listening = count_listening(ranks)

    def sending(engine: str, vllm: ReceivingVllm) -> Callable[[], Awaitable[Sent]]:
        transfer = NcclTransfer(engine, NcclGroups())
        return lambda: transfer.send(vllm, weights.tensors, dtypes, 1)

    vllm, other, refuses = [ReceivingVllm() for _ in range(3)]
    refuses.dies_at = "/init_weight_transfer_engine"
    send, send_to_other = sending("vllm", vllm), sending("other", other)
    ends = await asyncio.gather(sending("third", refuses)(), send(), send_to_other(), return_exceptions=True)
    assert isinstance(ends[0], EngineLost)  # and the others are served
    passes = count_broadcasts(ranks, monkeypatch)
    ends = [*ends[1:], *await asyncio.gather(send(), send_to_other())]
    assert passes == [["other", "vllm"]]  # each weight is gathered once for both
    for sent in ends:
        assert isinstance(sent, Sent)
        assert sent.checksums == {name: checksum(tensor) for name, tensor in expected.items()}
        assert sent.nbytes == sum(tensor.nbytes for tensor in expected.values())
    for found in (*vllm.received, *other.received):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    other.receives = False
    ends = await asyncio.gather(send(), send_to_other(), return_exceptions=True)
    assert isinstance(ends[0], Sent)  # although the other, which is sent the same at the same time, takes none
    assert isinstance(ends[1], EngineError) and f"did not take {next(iter(dtypes))} over" in str(ends[1])
    vllm.dies_at = "/update_weights"
    with pytest.raises(EngineLost):
        await send()
    restarted = ReceivingVllm()
    await sending("vllm", restarted)()
    torch.testing.assert_close(restarted.received[1], expected, rtol=0, atol=0)
    assert passes[1:] == [["other", "vllm"], ["vllm"], ["vllm"]]
    assert count_listening(ranks) == listening + 1  # the groups that failed are gone


def count_broadcasts(ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that gets the engines of each broadcast."""
    found, call = list[list[str]](), ranks.call

    async def counted(method: str, *arguments: Any, **options: Any) -> list[Any]:
        if method == "broadcast":
            found.append(sorted(arguments[0]))
        return await call(method, *arguments, **options)

    monkeypatch.setattr(ranks, "call", counted)
    return found


def count_listening(ranks: RankProcesses) -> int:
    """Return how many sockets rank 0 listens on."""
    return sum(one.status == "LISTEN" for one in psutil.Process(ranks.pids[0]).net_connections())
