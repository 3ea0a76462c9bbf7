"""Ranks compute the same, whether weights and gradients stay whole between micro-batches or not."""

from pathlib import Path

import pytest
import torch
from forked_commands import start_command
from rank_training import RANKS, train

from leyden.learner.peers import ALONE

TESTS = Path(__file__).parents[2]


def test_ranks_compute_the_same_and_gather_less_if_weights_stay_whole(tmp_path: Path) -> None:
    numbers, weights, _ = train(ALONE, lambda number: True)
    calls = []
    for number, room in enumerate(((True, True), (False, False), (True, False))):  # devices may differ
        meeting = str(tmp_path / f"meeting-{number}")
        files = [str(tmp_path / f"{number}-{rank}") for rank in range(RANKS)]
        running = []
        for rank, file in enumerate(files):
            code = f"from rank_training import train_as; train_as({rank}, {meeting!r}, {room[rank]}, {file!r})"
            running.append(start_command("-c", code, cwd=TESTS))
        assert [one.wait(120) for one in running] == [0] * RANKS
        found = [torch.load(file) for file in files]
        for ours, our_weights, sharded, _ in found:
            assert sharded
            assert ours == pytest.approx(numbers, rel=1e-9)
            for name, tensor in weights.items():
                torch.testing.assert_close(our_weights[name], tensor, rtol=1e-9, atol=1e-9)
        calls.append(found[0][-1])
    assert calls[0] < calls[1] / 2 and calls[2] == calls[1]
