"""How `leyden train` is stopped, and that a second one leaves a run alone that somebody is at."""

import re
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from forked_commands import run_command
from trainings import Training, children, line_with


def test_a_run_that_somebody_is_at_is_left_alone(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=1", "held_out=0")
    (tmp_path / "slow").touch()
    process = training.start()
    while not children(process.pid, "leyden.client.worker"):
        time.sleep(0.05)
    for more in ("training.group_size=2", "--restart"):
        second = run_command("train", "small.toml", more, cwd=tmp_path)
        assert second.returncode == 1
        assert "another process uses run 'small'" in second.stderr
    (tmp_path / "slow").unlink()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert [row["step"] for row in training.metrics()] == [1]


def test_one_interrupt_finishes_the_step_and_saves_and_two_stop_at_once(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=50", "checkpoints.every=50", "evaluation.every=0")
    process = training.start()
    line_with(process, " 1/50")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "finishing this step" in printed
    step = training.metrics()[-1]["step"]
    assert 0 < step < 50
    assert (training.run / f"step-{step}").exists()
    before = training.metrics()[0]["held_out/reward"]
    assert re.search(rf"held-out reward {before:.3f} ± \S+ before, not evaluated since", printed)

    printed = training.finish(f"training.steps={step + 2}")
    assert re.search(rf"step +{step + 1}/{step + 2} .* held-out {before:.3f} ± ", printed), printed
    step += 2

    (tmp_path / "slow").touch()
    process = training.start()
    line_with(process, f"after step {step}")
    line_with(process, "engine: torch")
    while not (tmp_path / "waiting").exists():
        time.sleep(0.05)
    workers = children(process.pid, "leyden.client.worker")
    process.send_signal(signal.SIGINT)
    line_with(process, "finishing this step")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "stopped; continue with: leyden train small.toml training.steps=50" in printed
    (worker,) = workers
    wait_ended(worker)
    rows = [row["step"] for row in training.metrics()]
    assert rows == list(range(len(rows)))


@pytest.mark.slow
def test_an_interrupt_in_the_first_evaluation_does_not_wait_for_its_agents(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=1")
    (tmp_path / "slow").touch()
    process = training.start()
    while not (tmp_path / "waiting").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "stopping the evaluation; the next start uses the rollouts that are finished" in printed
    assert "run small stopped at step 0 of 1" in printed
    (tmp_path / "slow").unlink()
    assert "step 1/1" in training.finish()


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_says_that_it_begins_again(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=3", "checkpoints.every=50", "evaluation.every=0")
    process = training.start()
    line_with(process, "step 1/3")
    process.kill()
    process.communicate(timeout=300)
    printed = training.finish()
    assert "small has no checkpoint yet: it begins again, with the rollouts that were recorded" in printed
    assert "sampled before" in printed


def test_a_second_interrupt_does_not_wait_for_the_update_that_is_computed(tmp_path: Path) -> None:
    training = Training(
        tmp_path, "held_out=0", "training.steps=2", "checkpoints.every=1", "algorithm.credit=credit.py:slow"
    )
    (tmp_path / "credit.py").write_text(SLOW_CREDIT)
    process = training.start()
    line_with(process, "step 1/2")
    while not (tmp_path / "computing").exists():
        time.sleep(0.05)
    (worker,) = children(process.pid, "leyden.client.worker")
    process.send_signal(signal.SIGINT)
    line_with(process, "finishing this step")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=300)  # the update takes an hour
    assert process.returncode == 130
    assert "stopped; continue with: leyden train small.toml held_out=0" in printed
    wait_ended(worker)
    (tmp_path / "fast").touch()
    printed = training.finish()
    assert "resuming small after step 1" in printed
    assert [row["step"] for row in training.metrics()] == [1, 2]
    assert [row["rollouts/succeeded"] for row in training.metrics()] == [6, 6]
    with closing(sqlite3.connect(training.run / "leyden.db")) as database:
        assert database.execute("SELECT count(*) FROM attempts WHERE ending = 'succeeded'").fetchone() == (12,)


SLOW_CREDIT = """
import time
from pathlib import Path


def slow(rewards, hyperparameters):
    here = Path(__file__).parent
    if (here / "runs/small/step-1").exists() and not (here / "fast").exists():
        (here / "computing").touch()
        time.sleep(3600)
    return [rewards.total] * len(rewards.steps)
"""


def wait_ended(pid: int) -> None:
    """Wait until a process has ended."""
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
