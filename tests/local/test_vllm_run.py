"""Runs with a real vLLM on the CPU: an agent with tools, through a crash of vLLM; and two adapters in one vLLM."""

import json
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
TWO_ROLES = """
import os

import httpx

client = httpx.Client(timeout=600)


def ask(text, role):
    answer = client.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-leyden-role": role},
        json={"model": "gpt", "messages": [{"role": "user", "content": text}], "max_tokens": 8},
    )
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def solve(task):
    answers = [ask(task["question"], role) for role in ("writer", "rival")]
    return ask("Which is right? " + " or ".join(answers), "checker")


def reward(task, result):
    return float(len(result or "") % 2)
"""
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


def test_two_adapters_are_trained_with_one_vllm_that_serves_earlier_versions_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    (tmp_path / "agent.py").write_text(TWO_ROLES)
    (tmp_path / "tasks.jsonl").write_text(
        "\n".join(json.dumps({"question": f"What is {n} plus {n}?"}) for n in range(8))
    )
    trained = leyden.train(
        run="two",
        agent="agent.py:solve",
        reward="agent.py:reward",
        tasks="tasks.jsonl",
        held_out=0,
        base=str(tmp_path),
        home=str(tmp_path / "runs"),
        engine=ENGINE,
        policies={
            "writer": {"roles": ["writer"]},
            "checker": {},
            "rival": {"of": "writer", "pool": "latest", "roles": ["rival"]},
        },
        checkpoints={"every": 1},
        training={"steps": 3, "tasks_per_step": 2, "group_size": 8, "lora": {"rank": 4}, "learning_rate": 1e-3},
    )
    assert [log.name for log in trained.folder.rglob("vllm*.log")] == ["vllm.log"]  # one server
    newest = {}
    for policy in ("writer", "checker"):
        steps = [line for line in read_metrics(trained.folder / "metrics.jsonl", policy) if line["step"]]
        assert [line["step"] for line in steps] == [1, 2, 3]
        differences = [line["training/kl_sampler_k3"] for line in steps if "training/kl_sampler_k3" in line]
        assert differences and max(differences) < 1e-4  # vLLM samples from what is trained
        newest[policy] = sum(line["tokens/trained"] > 0 for line in steps[:2])  # updates before the last step
    calls = [call for group in (4, 5) for episode in trained.episodes(f"train-{group}") for call in episode.calls]
    found = {(call.policy, run.number) for call in calls for run in call.versions}
    assert found == {*newest.items(), ("rival", newest["writer"])}  # which plays the checkpoint of the step before
