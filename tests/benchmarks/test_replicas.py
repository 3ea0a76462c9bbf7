"""The benchmark of replicas runs on a CPU, with embedded engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "replicas.py"


@pytest.mark.slow
def test_it_measures_one_engine_and_two(tmp_path: Path) -> None:
    sizes = ("--tokens", "4", "--prompt", "8", "--requests", "2", "4", "--rounds", "1")
    ran = subprocess.run(
        [sys.executable, BENCHMARK, *sizes, "--out", tmp_path], stdout=subprocess.PIPE, text=True, check=True
    )
    *_, one, two, last = ran.stdout.splitlines()
    assert one.startswith("1 ") and two.startswith("2 ")
    result = json.loads(last)
    assert result["ratio"] > 0
    assert all(set(found["tokens_per_s"]) == {"2", "4"} for found in result["replicas"].values())
    assert json.loads((tmp_path / "benchmark.json").read_text())["measured"]
