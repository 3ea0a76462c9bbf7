"""`make demo` says how the model was sampled, gives the greedy reward beside the sampled one, and keeps its result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_gives_the_greedy_reward_beside_the_sampled_one(tmp_path: Path) -> None:
    tasks = (ROOT / "examples" / "calc_plain" / "held_out.jsonl").read_text().splitlines()[:4]
    (tmp_path / "held_out.jsonl").write_text("\n".join(tasks))
    size = ["training.steps=1", "training.tasks_per_step=2", "training.group_size=2"]
    settings = [f"home={tmp_path / 'runs'}", f"held_out={tmp_path / 'held_out.jsonl'}", *size]
    kept = tmp_path / "kept"
    command = [sys.executable, "benchmarks/demo.py", "--out", str(kept), *settings]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(ran.stdout.splitlines()[-1])
    assert {"ratio", "before", "after", "greedy_before", "greedy_after"} <= result.keys()
    assert {path.name for path in kept.iterdir()} == {"benchmark.json", "config.toml", "curve.png", "metrics.jsonl"}
    assert json.loads((kept / "metrics.jsonl").read_text().splitlines()[0])["held_out/reward"] == result["before"]
    assert 'base = "examples/calc_plain"' in (kept / "config.toml").read_text()
    rows = [line.split() for line in ran.stderr.splitlines()]
    sampled, greedy = (
        f"{result[f'{kind}before']:.2f} {result[f'{kind}after']:.2f}".split() for kind in ("", "greedy_")
    )
    assert ["sampled", "at", "temperature", "1,", "as", "in", "training", *sampled] in rows
    assert ["greedy,", "at", "temperature", "0", *greedy] in rows
