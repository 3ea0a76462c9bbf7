"""The benchmark of whole steps runs on a CPU, with the bundled model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["noise", "match"])
def test_it_measures_steps_with_and_without_an_update(tmp_path: Path, singers: str, reward: str) -> None:
    tasks = [
        {"question": f"Who is {age} years old?", "database": singers, "query": f"SELECT {age}"} for age in range(20, 30)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    sizes = ("--tasks", "2", "--group", "3", "--steps", "2", "--set", "sampling.max_tokens=16")
    folders = ("--data", tmp_path, "--home", tmp_path / "runs", "--out", tmp_path / "out")
    words = [sys.executable, BENCHMARK, "--model", "spark", "--engine", "torch", "--reward", reward, *sizes, *folders]
    ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(ran.stdout.splitlines()[-1])
    measured = result["torch"]
    assert measured["steps"] == 2
    assert measured["timeouts"] == 0
    assert measured["step_s"] > 0
    assert measured["sampled_tokens_per_s"] > 0
    assert (measured["trained_tokens_per_s"] is not None) is (reward == "noise")
    kept = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert kept.pop("measured")["command"].startswith("python benchmarks/gpu_step.py")
    assert kept == result
    assert len((tmp_path / "out" / "metrics-torch.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out" / "config-torch.toml").exists()
