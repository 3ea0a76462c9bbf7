"""A sharded policy is gathered one weight at a time, and rank 0 broadcasts each to engines of other devices."""

import asyncio
from pathlib import Path

import psutil
import pytest
import torch
from receiving_vllm import ReceivingVllm, broadcasting_over_tcp
from transformers import LlamaConfig, LlamaForCausalLM

from leyden.config import Config
from leyden.engine.broadcast import Broadcaster
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.nccl import NcclTransfer
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.errors import RankLost
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


async def test_rank_0_broadcasts_whole_weights_and_ranks_end_if_nobody_receives_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMALL)
    model.save_pretrained(tmp_path / "model")
    source = ModelSource("small", tmp_path / "model")
    dtypes = {name: torch.float32 if "norm" in name else torch.bfloat16 for name, _ in model.named_parameters()}
    expected = {name: tensor.detach().to(dtypes[name]) for name, tensor in model.named_parameters()}
    checkpoints = Checkpoints(tmp_path / "run", CONFIG.policy, source, CONFIG.checkpoints)
    with broadcasting_over_tcp():
        async with RankProcesses(2, tmp_path, timeout_s=6) as ranks:
            learner = RankedLearner(ranks, RankSetup(CONFIG, source, "float32", False, False), checkpoints)
            await learner.start()
            weights = learner.weights(CONFIG.policy)
            assert isinstance(weights.tensors(), Broadcaster)
            engines = [(NcclTransfer(), ReceivingVllm()) for _ in range(2)]
            for version in (1, 2):
                sending = [transfer.send(vllm, weights.tensors, dtypes, version) for transfer, vllm in engines]
                for sent in await asyncio.gather(*sending):
                    assert sent.checksums == {name: checksum(tensor) for name, tensor in expected.items()}
                    assert sent.nbytes == sum(tensor.nbytes for tensor in expected.values())
                for found in (each for _, vllm in engines for each in vllm.received):
                    torch.testing.assert_close(found, expected, rtol=0, atol=0)
            transfer, vllm = engines[0]
            vllm.receives = False
            with pytest.raises(RankLost, match="of 2 training processes, rank 0 hangs: it has not answered for 6 s"):
                await transfer.send(vllm, weights.tensors, dtypes, 3)
    assert not any(map(psutil.pid_exists, ranks.pids))
