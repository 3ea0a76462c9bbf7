"""The benchmark beside TRL keeps every setting as it is measured, and compares Leyden with the fastest."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import loop_cuda  # its folder is on the path only now

PLAN = {"tasks": 2, "group": 4, "tokens": 8}


def measured(seconds: float, first_s: float) -> dict[str, Any]:
    """Return what one side reports of three steps, the first of which does not count."""
    steps = {"warmup_s": [first_s], "step_s": [seconds, seconds], "completion_tokens": [1000, 1000]}
    return {**steps, "generating_s": [0.1, 0.1], "scoring_s": [0.1, 0.1], "versions": {"torch": "2"}}


def keep_leyden(out: Path) -> None:
    piece = {**loop_cuda.summarise(measured(1.0, 11.0)), **PLAN}
    loop_cuda.report_result(piece, out, "leyden-torch", versions={"torch": "2"})


def options(out: Path) -> argparse.Namespace:
    return argparse.Namespace(peer="python", limit_s=60.0, out=out)


def test_the_fastest_setting_of_trl_counts_and_compiling_has_a_figure_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"8": (3.0, 4.0), "8-layers": (2.0, 42.0), "8-layers-uncorrected": (1.5, 2.0), "4": None}

    def peer(_: Any, plan: dict[str, Any], *__: Any) -> Iterator[dict[str, Any]]:
        for setting in plan["settings"]:
            took = times[loop_cuda.name_setting(setting)]
            yield {"setting": setting, **(measured(*took) if took else {"failed": "out of memory"})}

    monkeypatch.setattr(loop_cuda.peer, "run", peer)
    settings = [loop_cuda.read_setting(text) for text in ("8", "8,layers", "8,layers,uncorrected", "4")]
    keep_leyden(tmp_path)
    loop_cuda.measure_trl(PLAN, settings, options(tmp_path))
    loop_cuda.compare(tmp_path)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ratio"] == 2.0 and found["ratio_uncorrected"] == 1.5
    assert found["trl"]["setting"] == {"micro_batches": 8, "compile": "layers", "correction": True}
    assert (found["trl"]["first_step_s"], found["trl"]["compile_s"]) == (42.0, 40.0)
    assert (found["leyden"]["first_step_s"], found["leyden"]["compile_s"]) == (11.0, 10.0)
    assert json.loads((tmp_path / "trl-4.json").read_text())["failed"] == "out of memory"


def test_a_setting_that_ends_the_process_of_trl_fails_only_if_it_does_so_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def peer(_: Any, plan: dict[str, Any], *__: Any) -> Iterator[dict[str, Any]]:
        asked.append([loop_cuda.name_setting(setting) for setting in plan["settings"]])
        if asked[-1][0] != "4":
            yield {"setting": plan["settings"][0], **measured(3.0, 4.0)}

    monkeypatch.setattr(loop_cuda.peer, "run", peer)
    loop_cuda.measure_trl(PLAN, [loop_cuda.read_setting(text) for text in ("8", "4", "2")], options(tmp_path))
    assert asked == [["8", "4", "2"], ["4", "2"], ["2"]]
    kept = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert [name for name in kept if "failed" in kept[name]] == ["trl-4"] and len(kept) == 3
