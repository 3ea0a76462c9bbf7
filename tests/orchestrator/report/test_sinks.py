"""Metrics reach the places that a configuration names, in the forms that those places read."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from leyden.config import ConfigError, read_config
from leyden.orchestrator.report.sinks import TensorBoard, mlflow_name, opened_sinks

CONFIG = {"run": "r", "agent": "a:b", "tasks": "t"}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    with opened_sinks(read_config({**CONFIG, "report": ["tensorboard"]}), tmp_path) as (sink,):
        for step in range(3):
            sink.write(step, {"reward/mean": step / 2, "tokens/sampled": 10.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert "config/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
def test_tensorboard_shows_the_runs_of_a_home_folder(tmp_path: Path) -> None:
    with opened_sinks(read_config({**CONFIG, "report": ["tensorboard"]}), tmp_path / "runs" / "calc") as (sink,):
        sink.write(1, {"reward/mean": 0.5})
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "runs"), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
            deadline = time.monotonic() + 60
            while not (tags := requests.get(f"{url}data/plugin/scalars/tags", timeout=30).json()):
                assert time.monotonic() < deadline, "it has loaded nothing"
            assert list(tags) == ["calc/tensorboard"] and "reward/mean" in tags["calc/tensorboard"]
        finally:
            process.terminate()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_others_write_too_or_say_what_to_install(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    config = read_config({**CONFIG, "report": [name]})
    try:
        __import__(name)
    except ImportError:
        needs = pytest.raises(ConfigError, match=f"{name} needs the package {name}: pip install {name}")
        with needs, opened_sinks(config, tmp_path):
            pass
        return
    with opened_sinks(config, tmp_path) as (sink,):
        sink.write(0, {"reward/mean": 0.25})
    assert any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_resumed_run_goes_on_in_its_mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")  # it remembers that of another test
    for steps in ((0, 1), (1, 2)):
        with opened_sinks(read_config({**CONFIG, "report": ["mlflow"]}), tmp_path) as (sink,):
            for step in steps:
                sink.write(step, {"reward/mean": step / 2})
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("leyden").experiment_id])
    assert [each.step for each in client.get_metric_history(run.info.run_id, "reward/mean")] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("reward/role/Researcher & Writer (2)", "reward/role/Researcher   Writer  2 "),
        ("reward/kind/检索: a//b", "reward/kind/检索  a/_/b"),
        ("reward/role/../../loss", "reward/role/_/_/loss"),
    ],
)
def test_mlflow_gets_names_that_it_takes(name: str, taken: str) -> None:
    assert mlflow_name(name) == taken


def test_a_sink_is_closed_where_the_next_one_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = list[TensorBoard](), TensorBoard.close
    monkeypatch.setattr(TensorBoard, "close", lambda sink: (closed.append(sink), close(sink)))
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    config = read_config({**CONFIG, "report": ["tensorboard", "wandb"]})
    with pytest.raises(ConfigError, match="wandb"), opened_sinks(config, tmp_path):
        raise AssertionError("it needs a package that is missing")
    assert len(closed) == 1
