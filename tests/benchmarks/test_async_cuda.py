"""The comparison of settings counts a step of several policies once, and ends runs that take too long."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("async_cuda")


def line(step: int, time: float, policy: str, sampled: float) -> dict[str, Any]:
    names = ("rollouts/requested", "groups/requested", "tokens/sampled", "tokens/trained", "tokens/computed")
    zeros = dict.fromkeys(("groups/flat", "tokens/stale", "staleness/mean", "staleness/max", "reward/mean"), 0.0)
    times = {"time/sampling_s": 4.0, "time/training_s": 1.0, "time/publishing_s": 0.5}
    return {"step": step, "time": time, "policy": policy, **zeros, **times, **dict.fromkeys(names, 8.0)} | {
        "tokens/sampled": sampled
    }


def test_a_step_of_several_policies_counts_once(benchmark: Any, tmp_path: Path) -> None:
    lines = [line(step, 10.0 * step + late, name, 30.0) for step in (1, 2, 3) for late, name in ((0, "a"), (1, "b"))]
    for evaluated in lines[:2]:
        evaluated["held_out/reward"] = 0.25
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = benchmark.figures(tmp_path, tmp_path / "none")
    assert (found["step_s"], found["rollouts_per_s"], found["tokens_per_s"]) == (10.0, 0.8, 6.0)
    assert (found["sampling_s"], found["training_s"], found["publishing_s"]) == (4.0, 2.0, 1.0)
    assert (found["rollouts"], found["held_out"]) == (24, [[1, 1.0, 60, 0.25]])
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines[:4])))
    assert benchmark.figures(tmp_path, tmp_path / "none") is None


def test_a_run_that_takes_too_long_is_told_to_end_and_then_killed(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "GRACE_S", 30.0)
    # a signal just before a long sleep would be seen after it
    wait = "import signal, sys, time; signal.signal(signal.SIGINT, {}); print(flush=True)\nwhile True: time.sleep(0.05)"
    for handler, status in (("lambda *_: sys.exit(7)", 7), ("signal.SIG_IGN", -9)):
        process = subprocess.Popen([sys.executable, "-c", wait.format(handler)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout as ready:
            ready.readline()
        assert benchmark.end(process, 0.0) == status
        monkeypatch.setattr(benchmark, "GRACE_S", 0.1)
