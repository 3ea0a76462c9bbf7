"""Ranks compute the same, whether weights and gradients stay whole between micro-batches or not; and where they are."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from rank_training import RANKS, train, train_as
from torch.distributed import TCPStore

from leyden.learner.peers import ALONE
from leyden.learner.ranks.peers import own_address


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
        yield pool


def test_ranks_compute_the_same_and_gather_less_if_weights_stay_whole(
    processes: ProcessPoolExecutor, tmp_path: Path
) -> None:
    numbers, weights, _ = train(ALONE, lambda number: True)
    calls = []
    for number, room in enumerate(((True, True), (False, False), (True, False))):  # devices may differ
        meeting = tmp_path / f"meeting-{number}"
        running = [processes.submit(train_as, rank, meeting, room[rank]) for rank in range(RANKS)]
        found = [one.result() for one in running]
        for ours, our_weights, sharded, _ in found:
            assert sharded
            assert ours == pytest.approx(numbers, rel=1e-9)
            for name, tensor in weights.items():
                torch.testing.assert_close(our_weights[name], tensor, rtol=1e-9, atol=1e-9)
        calls.append(found[0][-1])
    assert calls[0] < calls[1] / 2 and calls[2] == calls[1]


def test_a_rank_knows_the_address_by_which_the_others_reach_it(tmp_path: Path) -> None:
    assert own_address(str(tmp_path / "meeting")) == "127.0.0.1"
    store = TCPStore("127.0.0.1", 0, is_master=True)
    assert own_address(f"127.0.0.1:{store.port}") == "127.0.0.1"
