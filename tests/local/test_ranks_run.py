"""A run on two training processes goes on from its checkpoint when one of them is killed."""

from pathlib import Path

import pytest
from trainings import Training, after_lines, children, kill

from leyden.learner.sharded_files import is_sharded


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_after_a_rank_is_killed(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.devices=2", "training.steps=6", "checkpoints.every=1")
    process = training.start()
    after_lines(process, 3)
    ranks = children(process.pid, "leyden.learner.ranks.rank")
    assert len(ranks) == 2
    kill(ranks[1])
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "of 2 training processes, rank 1 ended (killed by SIGKILL)" in printed
    assert "the run goes on from its last checkpoint (restart 1 of 3)" in printed
    steps = [line for line in training.metrics() if line["step"]]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["training/kl_sampler_k3"] < 1e-6 for line in steps if "training/kl_sampler_k3" in line)
    assert is_sharded(next(tmp_path.glob("**/step-6")))
