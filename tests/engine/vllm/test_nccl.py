"""Weights that this process broadcasts to the workers of a vLLM, over a group that stands for NCCL's.

No machine of ours has two GPUs. Ranks that broadcast are tested with the learner.
"""

import sys
from collections.abc import Iterator

import pytest
import torch
from receiving_vllm import ReceivingVllm, broadcasting_over_tcp

from leyden.engine.broadcast import NcclGroups
from leyden.engine.protocol import EngineError, EngineLost
from leyden.engine.vllm import nccl
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.nccl import NcclTransfer

WEIGHTS = {"a": torch.randn(3, 2).t(), "b": torch.ones(4)}
DTYPES = {"a": torch.float32, "b": torch.bfloat16}


@pytest.fixture
def vllm() -> Iterator[ReceivingVllm]:
    with broadcasting_over_tcp():
        yield ReceivingVllm()


def transfer_of(limit_s: float = 60.0) -> NcclTransfer:
    return NcclTransfer("vllm", NcclGroups(limit_s))


async def test_all_workers_have_the_weights_in_the_precisions_that_they_serve(vllm: ReceivingVllm) -> None:
    transfer = transfer_of()
    served = {name: tensor.to(DTYPES[name]) for name, tensor in WEIGHTS.items()}
    for version in (1, 2):
        sent = await transfer.send(vllm, WEIGHTS.items, DTYPES, version)
        assert sent == ({name: checksum(tensor) for name, tensor in served.items()}, 32)
        for found in vllm.received:
            assert list(found) == ["a", "b"]
            assert all(found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in served.items())
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert vllm.paths == ["/init_weight_transfer_engine", *update, *update]


@pytest.mark.parametrize(("dtypes", "says"), [({"a": torch.float32}, "no tensor b"), ({**DTYPES, "c": 1}, "tensor c")])
async def test_other_tensors_than_vllm_serves_are_refused(
    vllm: ReceivingVllm, dtypes: dict[str, torch.dtype], says: str
) -> None:
    with pytest.raises(EngineError, match=says):
        await transfer_of().send(vllm, WEIGHTS.items, dtypes, 1)
    assert "/start_weight_update" not in vllm.paths


async def test_a_vllm_that_takes_no_weights_is_an_error(vllm: ReceivingVllm) -> None:
    transfer = transfer_of(1.0)
    await transfer.send(vllm, WEIGHTS.items, DTYPES, 6)
    vllm.receives = False
    for why in ("it waited for 0.5 s", "its group was aborted"):
        with pytest.raises(EngineError, match=f"the workers of vLLM did not take a over NCCL: {why}"):
            await transfer.send(vllm, WEIGHTS.items, DTYPES, 7)


async def test_a_vllm_that_has_the_weights_and_does_not_answer_is_an_error(
    vllm: ReceivingVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = transfer_of()
    await transfer.send(vllm, WEIGHTS.items, DTYPES, 2)
    monkeypatch.setattr(nccl, "_LIMIT_S", 0.05)
    vllm.answers_update = False
    with pytest.raises(EngineError, match="vLLM did not answer in 0 s that it has weights 3"):
        await transfer.send(vllm, WEIGHTS.items, DTYPES, 3)


async def test_workers_that_do_not_join_are_an_error(vllm: ReceivingVllm) -> None:
    vllm.dies_at = "/init_weight_transfer_engine"
    with pytest.raises(EngineLost):
        await transfer_of(2.0).send(vllm, WEIGHTS.items, DTYPES, 1)


async def test_what_vllm_needs_for_nccl_is_said(vllm: ReceivingVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    with pytest.raises(EngineError, match="unset VLLM_DISABLE_PYNCCL"):
        await transfer_of().send(vllm, WEIGHTS.items, DTYPES, 1)
    monkeypatch.setitem(sys.modules, "vllm.distributed.utils", None)
    with pytest.raises(EngineError, match="NCCL needs vLLM in the trainer's environment"):
        await transfer_of(1.0).send(vllm, WEIGHTS.items, DTYPES, 1)
