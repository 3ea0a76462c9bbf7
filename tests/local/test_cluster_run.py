"""A run on a Ray cluster of two nodes goes on when one of them is lost, and ends."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from trainings import Training, line_with

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

STEPS = 6
SETTINGS = (
    "training.devices=2",
    "engine.replicas=2",
    f"training.steps={STEPS}",
    "evaluation.every=0",
    "checkpoints.every=1",
    "rollout.lease_s=5",
    "training.device_timeout_s=300",
)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with just enough room for a whole run. The folder's name is short, since sockets are in it."""
    with TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        running = Cluster()
        start_node(running, 5, include_dashboard=False)
        yield running
        running.shutdown()


def start_node(cluster: Cluster, cpus: int, **more: Any) -> Any:
    """Ray gives a node half a minute to start, which is little if others compute."""
    for _ in range(3):
        try:
            return cluster.add_node(num_cpus=cpus, **more)
        except Exception as error:
            failed = error
    raise failed


def processes_of(raylet: int, module: str) -> list[int]:
    """The processes on a node that run a module."""
    family = psutil.Process(raylet).children(recursive=True)
    return [process.pid for process in family if process.is_running() and module in process.cmdline()]


@pytest.mark.slow
def test_a_run_goes_on_after_a_node_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    lost = start_node(cluster, 8)  # Ray puts ranks on the larger node
    raylet = lost.all_processes["raylet"][0].process.pid
    training = Training(tmp_path, *SETTINGS)
    process = training.start("--ray", "--ray-address", cluster.address)
    line_with(process, "step 2")
    assert len(processes_of(raylet, "leyden.learner.ranks.rank")) == 2
    assert len(processes_of(raylet, "leyden.engine.torch")) == 1
    family = psutil.Process(raylet).children(recursive=True)
    os.kill(raylet, signal.SIGKILL)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    assert "is lost" in printed and "the run goes on from its last checkpoint (restart 1 of 3)" in printed
    steps = [line for line in training.metrics() if line["step"]]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["rollouts/succeeded"] == 6 for line in steps)
    assert all(line["training/kl_sampler_k3"] < 1e-6 for line in steps if "training/kl_sampler_k3" in line)
    assert {file.name for file in training.run.glob("*.log")} >= {
        "rank-0.log",
        "rank-1.log",
        "engine-0.log",
        "engine-1.log",
    }
    assert not psutil.wait_procs(family, timeout=60)[1]
