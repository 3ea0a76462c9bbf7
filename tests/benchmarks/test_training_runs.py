"""`benchmarks/training_runs.py` makes runs at the same time, keeps each at once, and goes on after its limit."""

import json
import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import training_runs
from training_runs import Run, add_runs, make_runs

TRAINER = """
import json, os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, lambda *_: sys.exit())  # as training does after it has saved
settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
run = Path(settings["home"]) / settings["run"]
resumed = run.exists()
run.mkdir(exist_ok=True)
if settings["seed"] == "7":
    sys.exit("out of memory")
if settings.get("long") and not resumed:
    signal.pause()
line = {"policy": "policy", "step": 1, "resumed": resumed, "time/training_s": 3.0, "time/evaluation_s": 1.0}
line |= {"cores": len(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"]}
(run / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
"""
"""Stands in for `leyden train`."""


@pytest.fixture(autouse=True)
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.setattr(training_runs, "COMMAND", [sys.executable, "-S", str(tmp_path / "trainer.py")])


def make(tmp_path: Path, wanted: dict[Any, list[str]], *options: str) -> dict[Any, Run]:
    parser = ArgumentParser()
    add_runs(parser, tmp_path / "results" / "runs.jsonl")
    kept = ("resumed", "cores", "threads")
    return make_runs(
        ("seed",), wanted, lambda metrics: {name: metrics[-1][name] for name in kept}, parser.parse_args(options)
    )


def test_runs_are_kept_and_not_repeated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = {(seed,): [f"seed={seed}"] for seed in (0, 1, 7)}
    runs = make(tmp_path, wanted, "--jobs", "2", "--threads", "1")
    assert runs[0,] == {"seed": 0, "resumed": False, "cores": 1, "threads": "1", "seconds": 4}
    assert set(runs) == {(0,), (1,)} and "out of memory" in capfd.readouterr().err
    assert len(os.sched_getaffinity(0)) >= runs[1,]["cores"]
    lines = (tmp_path / "results" / "runs.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["seed"] for line in lines) == [0, 1]
    del wanted[7,]
    assert make(tmp_path, wanted) == runs and "of" not in capfd.readouterr().out


def test_times_that_policies_share_are_counted_once_and_the_folder_of_a_run_is_looked_at(tmp_path: Path) -> None:
    line = '(run / "metrics.jsonl").write_text('
    trainer = TRAINER.replace(line, f'{line}json.dumps({{**line, "policy": "other"}}) + "\\n" + ')
    (tmp_path / "trainer.py").write_text(trainer)
    parser = ArgumentParser()
    add_runs(parser, tmp_path / "runs.jsonl")
    (run,) = make_runs(
        ("seed",),
        {(0,): ["seed=0"]},
        lambda metrics: {"policies": [line["policy"] for line in metrics]},
        parser.parse_args([]),
        lambda arguments, folder: {"arguments": arguments, "there": (folder / "metrics.jsonl").exists()},
    ).values()
    expected = {"policies": ["other", "policy"], "seconds": 7, "arguments": ["seed=0"], "there": True}
    assert run == {"seed": 0, **expected} == json.loads((tmp_path / "runs.jsonl").read_text())


def test_a_run_that_the_limit_stops_goes_on_later(tmp_path: Path) -> None:
    wanted, unfinished = {(3,): ["seed=3", "long=yes"]}, tmp_path / "results" / "runs.unfinished"
    while not (unfinished / "3" / "run").exists():  # on busy cores it is stopped before it begins
        assert make(tmp_path, wanted, "--limit-s", "0.2") == {}
    assert make(tmp_path, wanted)[3,]["resumed"] and not unfinished.exists()
