"""Whatever is killed, whenever, a run that is started again ends with the accounts of an undisturbed one."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from trainings import Training, after_lines, children, kill, line_with


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("undisturbed"), "deterministic=true")
    training.finish()
    return training


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_trainer_that_is_killed_resumes_to_the_same_weights(seed: int, undisturbed: Training, tmp_path: Path) -> None:
    rng = random.Random(seed)
    training = Training(tmp_path, "deterministic=true")
    for lines in (1, 2):
        process = training.start()
        after_lines(process, lines)
        time.sleep(rng.uniform(0, 1.0))  # the moment is the point
        others = children(process.pid)
        kill(process.pid)
        process.communicate()
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in others) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in others)
    training.finish()
    assert training.accounts() == undisturbed.accounts()
    assert training.weights() == undisturbed.weights()


def test_a_server_and_a_worker_that_are_killed_are_replaced_and_nothing_is_missing(
    undisturbed: Training, tmp_path: Path
) -> None:
    training = Training(tmp_path, "rollout.lease_s=2")
    process = training.start()
    for _ in range(2):
        after_lines(process, 1)
        (server,) = children(process.pid, "leyden.server")
        kill(server)
        assert "(killed by SIGKILL)" in line_with(process, "it is started again")
    (worker,) = children(process.pid, "leyden.client.worker")
    kill(worker)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert training.accounts() == undisturbed.accounts()


def test_a_signal_to_all_processes_lets_the_step_in_hand_finish(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=50", "checkpoints.every=50", "evaluation.every=0")
    process = training.start()
    after_lines(process, 2)
    for pid in (*children(process.pid, "leyden.server"), process.pid):
        os.kill(pid, signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert (training.run / f"step-{training.metrics()[-1]['step']}").exists()
