"""The benchmark of tool calls tells well-formed calls from JSON in the text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.user_code.loading import load_function

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "tool_calls.py"
CALL = '{"name": "calculator", "arguments": {"expression": "1"}}'


@pytest.mark.parametrize(
    ("response", "broken", "kind"),
    [
        ({"content": None, "tool_calls": [{}]}, False, "well_formed"),
        ({"content": None, "tool_calls": [{}]}, True, "malformed"),
        ({"content": f"So:\n```json\n{CALL}\n```"}, False, "fenced"),
        ({"content": f"So: {CALL}"}, False, "bare"),
        ({"content": f"```json\n{{}}\n```\n{CALL}"}, False, "bare"),
        ({"content": "#### 42"}, False, "answer"),
        ({"content": None}, False, "answer"),
    ],
)
def test_an_answer_has_one_kind(response: dict[str, object], broken: bool, kind: str) -> None:
    assert load_function(f"{BENCHMARK}:kind_of", ".")(response, broken) == kind


@pytest.mark.slow
def test_it_counts_the_calls_of_the_bundled_model(tmp_path: Path) -> None:
    config = BENCHMARK.parents[1] / "examples" / "calc" / "spark.toml"
    words = [sys.executable, BENCHMARK, config, "--tasks", "8", "--home", tmp_path, "--out", tmp_path]
    ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["rollouts"] == 8
    assert result["share"] > 0.9
    assert result["well_formed"] > 0
    assert result["answer"] > 0
    kept = json.loads((tmp_path / "benchmark.json").read_text())
    assert kept.pop("measured")["config"] == str(config)
    assert kept == result
