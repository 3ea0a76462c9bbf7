"""Every ablation is a run that Leyden accepts, and the table has what the runs measured."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.loading import load_function
from leyden.local.api import build_config
from leyden.trainer.algorithm.resolve import algorithm_of

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "ablations.py"


def test_every_variant_is_a_valid_run() -> None:
    settings_of = load_function(f"{BENCHMARK}:settings_of", ".")
    studies = settings_of.__globals__["STUDIES"]
    options = argparse.Namespace(steps=2, learning_rate=1e-3, evaluate_every=1)
    for study, (example, variants) in studies.items():
        for variant in variants:
            settings = settings_of(study, variant, options)
            config = build_config(BENCHMARK.parents[1] / "examples" / example / "spark.toml", **settings)
            assert config.training.steps == 2, (study, variant)
            algorithm_of(config)


@pytest.mark.slow
def test_a_study_runs_in_parts_and_makes_a_table(tmp_path: Path) -> None:
    sizes = ("--seeds", "1", "--steps", "1", "--out", tmp_path)
    for variant in ("tree", "rows"):
        words = [sys.executable, BENCHMARK, "run", "--study", "layout-rag", "--variant", variant, *sizes]
        ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])["layout-rag"]
    assert set(found) == {"tree", "rows"}
    assert all(entry["seeds"] == 1 and 0 <= entry["held_out_after"][0] <= 1 for entry in found.values())
    kept = json.loads((tmp_path / "layout-rag" / "tree-0.json").read_text())
    assert [row["step"] for row in kept["metrics"]] == [0, 1]
