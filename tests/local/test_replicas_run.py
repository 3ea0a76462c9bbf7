"""A run with two engine processes, one of which is killed on the way, loses no rollout."""

from pathlib import Path

import pytest
from trainings import Training, after_lines, children, kill


@pytest.mark.slow
def test_a_run_goes_on_while_a_killed_replica_is_started_again(tmp_path: Path) -> None:
    training = Training(tmp_path, "engine.replicas=2", "training.steps=6", "evaluation.every=3")
    process = training.start()
    after_lines(process, 2)
    engines = children(process.pid, "leyden.engine.torch")
    assert len(engines) == 2
    kill(engines[0])
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "an engine process ended (killed by SIGKILL)" in printed
    steps = [line for line in training.metrics() if line["step"]]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["rollouts/succeeded"] == 6 for line in steps)
    assert not any(name.startswith("rollouts/excluded/engine") for line in steps for name in line)
    assert all(line["training/kl_sampler_k3"] < 1e-6 for line in steps if "training/kl_sampler_k3" in line)
