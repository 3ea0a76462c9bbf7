"""Every ablation is a run that Leyden accepts, and the table has what the runs measured."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.learner.objective import objective_of
from leyden.local.api import build_config
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.user_code.loading import load_function

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "ablations.py"


def test_every_variant_is_a_valid_run() -> None:
    settings_of = load_function(f"{BENCHMARK}:settings_of", ".")
    agents, variants_of = (settings_of.__globals__[name] for name in ("AGENTS", "variants_of"))
    options = argparse.Namespace(steps=2, learning_rate=1e-3, evaluate_every=1)
    for agent, (folder, _) in agents.items():
        for variant in variants_of(agent):
            settings = settings_of(agent, variant, options)
            config = build_config(BENCHMARK.parents[1] / folder / "spark.toml", **settings)
            assert config.training.steps == 2, (agent, variant)
            algorithm_of(config), objective_of(config)


@pytest.mark.slow
def test_an_agent_runs_in_parts_and_makes_a_table(tmp_path: Path) -> None:
    sizes = ("--seeds", "1", "--steps", "1", "--out", tmp_path)
    for variant in ("unchanged", "rows"):
        words = [sys.executable, BENCHMARK, "run", "--agent", "rag", "--variant", variant, *sizes]
        ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])["rag"]
    assert set(found) == {"unchanged", "rows"}
    assert all(entry["seeds"] == 1 and 0 <= entry["held_out_after"][0] <= 1 for entry in found.values())
    kept = json.loads((tmp_path / "rag" / "unchanged-0.json").read_text())
    assert [row["step"] for row in kept["metrics"]] == [0, 1]
