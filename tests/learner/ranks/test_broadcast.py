"""A sharded policy is gathered one weight at a time, and rank 0 broadcasts each to engines of other devices."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from receiving_vllm import ReceivingVllm, broadcasting_over_tcp
from transformers import LlamaConfig, LlamaForCausalLM

from leyden.config import Config
from leyden.engine.broadcast import Broadcaster, NcclGroups, Sent
from leyden.engine.protocol import EngineError, EngineLost
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.nccl import NcclTransfer
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.ranks import gathered
from leyden.learner.ranks.learner import RankedLearner
from leyden.learner.ranks.messages import RankSetup
from leyden.learner.ranks.processes import RankProcesses
from leyden.models.source import ModelSource

CONFIG = Config(run="r", agent="a", tasks="t")
SMALL = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=True,
)


async def test_rank_0_broadcasts_whole_weights_at_once_and_ranks_outlive_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "_TOGETHER_S", 30.0)  # busy machines too
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMALL)
    model.save_pretrained(tmp_path / "model")
    source = ModelSource("small", tmp_path / "model")
    dtypes = {name: torch.float32 if "norm" in name else torch.bfloat16 for name, _ in model.named_parameters()}
    expected = {name: tensor.detach().to(dtypes[name]) for name, tensor in model.named_parameters()}
    checkpoints = Checkpoints(tmp_path / "run", CONFIG.policy, source, CONFIG.checkpoints)
    with broadcasting_over_tcp():
        async with RankProcesses(2, tmp_path, timeout_s=12) as ranks:
            learner = RankedLearner(ranks, RankSetup(CONFIG, source, "float32", False, False), checkpoints)
            await learner.start()
            weights = learner.weights(CONFIG.policy)
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
            assert isinstance(ends[1], EngineError) and "did not take model.embed_tokens.weight" in str(ends[1])
            vllm.dies_at = "/update_weights"
            with pytest.raises(EngineLost):
                await send()
            restarted = ReceivingVllm()
            await sending("vllm", restarted)()
            torch.testing.assert_close(restarted.received[1], expected, rtol=0, atol=0)
            assert passes[1:] == [["other", "vllm"], ["vllm"], ["vllm"]]
            assert count_listening(ranks) == listening + 1  # the groups that failed are gone
            assert await learner.start_step(CONFIG.policy, 1) > 0  # the ranks go on
    assert not any(map(psutil.pid_exists, ranks.pids))


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
    return sum(one.status == "LISTEN" for one in psutil.Process(ranks.pids[0]).net_connections())
