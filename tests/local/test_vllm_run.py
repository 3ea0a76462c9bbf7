"""A run with a real vLLM on the CPU: an agent with tools is trained, and a vLLM that is killed is started again."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

import leyden
from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.process import guardian
from leyden.records import DEFAULT_POLICY

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("LEYDEN_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(PYTHON) is None, reason="there is no vLLM: run `make vllm-env`"),
]
ENGINE = {"kind": "vllm", "vllm_python": PYTHON, "vllm_arguments": ["--enforce-eager", "--max-num-seqs", "32"]}


def kill_vllm_once(until: threading.Event) -> None:
    """Kill vLLM's server after the first step has published weights."""
    while not until.wait(0.2):
        for process in psutil.Process().children(recursive=True):
            words = process.cmdline()
            if "vllm.entrypoints.openai.api_server" in words and process.name() != guardian.NAME:
                os.kill(process.pid, signal.SIGKILL)
                return


def test_an_agent_with_tools_is_trained_through_a_crash_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    metrics = tmp_path / "runs" / "calc" / "metrics.jsonl"
    done = threading.Event()

    def wait_and_kill() -> None:
        while not done.is_set() and not any(line["step"] >= 1 for line in read_metrics(metrics, DEFAULT_POLICY)):
            time.sleep(0.2)
        kill_vllm_once(done)

    killer = threading.Thread(target=wait_and_kill)
    killer.start()
    try:
        trained = leyden.train(
            ROOT / "examples" / "calc_plain" / "calc.toml",
            run="calc",
            home=str(tmp_path / "runs"),
            held_out=0,
            engine=ENGINE,
            training={"steps": 4, "tasks_per_step": 4, "group_size": 4},
        )
    finally:
        done.set()
        killer.join()
    steps = [line for line in read_metrics(metrics, DEFAULT_POLICY) if line["step"]]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["training/kl_sampler_k3"] < 1e-4 for line in steps if "training/kl_sampler_k3" in line)
    episodes = [episode for group in range(0, 16, 4) for episode in trained.episodes(f"train-{group}")]
    assert any(
        call.prompt_origin == "continued" for episode in episodes for call in episode.calls
    )  # by the exact tokens
    assert sum(line.get("rollouts/excluded/engine_error", 0) for line in steps) < 16  # a step's worth: others waited
    assert "vLLM ended" in caplog.text
