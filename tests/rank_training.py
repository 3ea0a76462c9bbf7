"""Trains a small policy alone or as one of two ranks, in processes that can import this and no test."""

from collections.abc import Callable
from unittest.mock import patch

import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from leyden.config import TrainingConfig
from leyden.learner import memory
from leyden.learner.peers import Peers
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs
from leyden.learner.ranks import peers
from leyden.learner.ranks.messages import World
from leyden.learner.ranks.peers import RankPeers

RANKS = 2
STEPS = 2


def train(with_peers: Peers, own: Callable[[int], bool]) -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    """Make updates of several micro-batches; return values, weights, and whether these were shards between calls."""
    model = small_policy().model.to(torch.float64)
    torch.manual_seed(1)
    config = TrainingConfig(learning_rate=1e-2, layout="rows", batch_tokens=64)
    policy = Policy(model, config, critic=True, peers=with_peers)
    numbers: list[float] = []
    sharded: list[bool] = []

    def note_kinds() -> None:
        sharded.extend(isinstance(each, DTensor) for each in policy.model.parameters())

    for step in range(STEPS):
        samples = [one for number, one in enumerate(some_samples(12, seed=step)) if own(number)]
        policy.evaluate(samples)
        note_kinds()
        metrics = policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
        note_kinds()
        policy.apply(metrics.grad_norm)
        numbers += [metrics.loss, metrics.grad_norm, metrics.critic_loss or 0.0]
    whole = {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in policy.parameters.items()
    }
    return numbers, {name: each.detach() for name, each in whole.items()}, sharded


def train_as(rank: int, meeting: str, keeps_whole: bool, found: str) -> None:
    """Train as one of several ranks; write what was found to a file, and how often weights were gathered."""
    torch.set_num_threads(1)
    gather = "foreach_all_gather"
    with (
        patch.object(memory, "_UNIT_BYTES", 0),  # every layer is one
        patch.object(peers, "keeps_whole", lambda size: keeps_whole),
        patch.object(_fsdp_param_group, gather, wraps=getattr(_fsdp_param_group, gather)) as gathered,
    ):
        own = RankPeers(World(rank, RANKS, meeting, 60.0, "127.0.0.1"), torch.device("cpu"))
        try:
            numbers, weights, sharded = train(own, lambda number: (number % 3 == 0) == (rank == 0))
        finally:
            torch.distributed.destroy_process_group()
    torch.save((numbers, weights, all(sharded), gathered.call_count), found)
