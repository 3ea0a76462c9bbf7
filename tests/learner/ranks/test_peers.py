"""Ranks compute the same, whether weights and gradients stay whole between micro-batches or not."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from rank_training import RANKS, train, train_as

from leyden.learner.peers import ALONE


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
