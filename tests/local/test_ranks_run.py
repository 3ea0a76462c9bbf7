"""A run on two training processes goes on from its checkpoint when one of them is killed, whoever started them."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from trainings import Training, after_lines, children, kill

from leyden.config import ConfigError
from leyden.learner.errors import RankLost
from leyden.learner.sharded_files import is_sharded
from leyden.local import train


@pytest.mark.parametrize(("error", "tries"), [(RankLost, 3), (ConfigError, 1)])
async def test_a_run_that_loses_ranks_goes_on_as_often_as_it_may(
    error: type[Exception], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, tried = list[str](), 0
    monkeypatch.setattr(train, "print_note", notes.append)

    async def run() -> train.States:
        nonlocal tried
        tried += 1
        raise error("of 2 training processes, rank 1 hangs")

    with pytest.raises(error, match="rank 1 hangs"):
        await train._restarting(run, 2)
    assert tried == tries
    goes_on = "of 2 training processes, rank 1 hangs; the run goes on from its last checkpoint"
    assert notes == [f"{goes_on} (restart {number} of 2)" for number in range(1, tries)]


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


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """Read lines until one has a text."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or text not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_starts_all_again_when_one_is_killed(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=200", "checkpoints.every=1", "evaluation.every=0")
    words = ["torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "leyden", "train"]
    command = [sys.executable, "-m", *words, "small.toml", *training.settings]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        printed = read_until(process, "step   3/200")
        (rank,) = [one for one in psutil.Process(process.pid).children() if one.environ().get("RANK") == "1"]
        rank.kill()
        printed += read_until(process, "resuming small after step ")
        read_until(process, "step   9/200")
        process.terminate()  # the trainer finishes its step, and saves
        rest, _ = process.communicate(timeout=120)
    assert f"failed (exitcode: -9) local_rank: 1 (pid: {rank.pid})" in printed
    assert "finishing this step, then saving" in rest and "stopped at step" in rest
    steps = [line["step"] for line in training.metrics() if line["step"]]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 9
