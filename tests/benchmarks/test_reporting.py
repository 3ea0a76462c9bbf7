"""Benchmarks print and keep their results in one way, and two checkouts are compared by requests that both know."""

import json
import re
import sys
from pathlib import Path

import pytest

from leyden.api.wire import GroupSpec, RunSpec
from leyden.records import RunSettings, Task

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import checkouts  # noqa: E402  # its folder is on the path only now
import reporting  # noqa: E402
import sql_baseline  # noqa: E402


def test_the_result_is_the_last_line_and_is_kept_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["/somewhere/store.py", "--seconds", "2", "--out", str(tmp_path), "--against", "/elsewhere"]
    monkeypatch.setattr(sys, "argv", words)
    reporting.report_result({"ratio": 2.0}, tmp_path / "store", peer="another")
    kept = json.loads((tmp_path / "store" / "benchmark.json").read_text())
    measured = kept.pop("measured")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == kept == {"ratio": 2.0}
    assert measured["command"] == "python benchmarks/store.py --seconds 2 --against CHECKOUT"
    assert measured["peer"] == "another" and "cores" in measured["machine"] and measured["date"]


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reporting.report_result({"ratio": 2.0}, None)
    assert list(tmp_path.iterdir()) == []


def test_make_keeps_the_result_of_every_benchmark_that_it_runs() -> None:
    lines = re.findall(r"benchmarks/(\w+)\.py(.*)", (ROOT / "Makefile").read_text())
    kept = {name for name, options in lines if f"--out results/{name}" in options}
    assert {"store", "gateway", "workers", "loop", "chaos", "fuzz"} <= kept
    assert {name for name, _ in lines} == kept, "some do not keep their results"


def test_every_kept_result_has_a_ratio_as_its_headline() -> None:
    kept = {path: json.loads(path.read_text()) for path in (ROOT / "results").glob("*/benchmark.json")}
    assert {path.parent.name for path in kept} >= {"ablations", "chaos", "demo", "examples", "fuzz", "harnesses", "sql"}
    assert not [path for path, result in kept.items() if not isinstance(result.get("ratio"), int | float)]
    assert not [path for path, result in kept.items() if "measured" not in result]


def test_the_pooled_baseline_of_the_sql_agent_is_that_of_its_runs() -> None:
    kept = json.loads((ROOT / "results" / "sql" / "benchmark.json").read_text())
    del kept["measured"]
    assert sql_baseline.pooled() == kept
    assert kept["before_pooled"] == json.loads((ROOT / "results" / "sql" / "summary.json").read_text())["before_pooled"]


def test_only_fields_that_differ_from_their_defaults_are_sent_to_another_checkout() -> None:
    assert checkouts.without_defaults(RunSpec("r", RunSettings(lease_s=5.0))) == {
        "id": "r",
        "settings": {"lease_s": 5.0},
    }
    assert checkouts.without_defaults([GroupSpec("g", Task("t", {"q": 1}))]) == [
        {"id": "g", "task": {"id": "t", "input": {"q": 1}}}
    ]
