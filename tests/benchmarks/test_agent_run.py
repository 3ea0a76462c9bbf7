"""The benchmark of an example's agent says what the agent does differently after training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_calls_tool_calls_and_the_reward_without_the_tool_are_measured(tmp_path: Path) -> None:
    tasks = (ROOT / "examples" / "calc_plain" / "held_out.jsonl").read_text().splitlines(keepends=True)[:4]
    (tmp_path / "held_out.jsonl").write_text("".join(tasks))
    size = ["training.steps=2", "training.tasks_per_step=2", "training.group_size=4", "evaluation.rollouts=2"]
    settings = [f"home={tmp_path / 'runs'}", f"held_out={tmp_path / 'held_out.jsonl'}", *size]
    words = ["benchmarks/agent_run.py", "examples/calc/spark.toml", *settings, "--score", "reward.py:reward"]
    command = [sys.executable, *words, "--out", str(tmp_path / "out")]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["without_tool"] == summary["reward"]["without_tool"]
    for when in ("before", "after"):
        assert summary["tool_calls"][when] > 0  # spark was taught to call its calculator
        assert summary["calls"][when] > summary["tool_calls"][when]  # and answers after it
        assert 0 < summary["rollouts_with_tool_calls"][when] <= 1
        assert summary["reward"][when] == pytest.approx(summary[when], abs=1e-4)
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert kept == {"summary.json", "rollouts.md", "metrics.jsonl", "config.toml", "curve.png"}
