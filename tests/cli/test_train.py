"""What `leyden train` prints at its end."""

import argparse
from pathlib import Path

import pytest

from leyden.cli.train import _print_result
from leyden.local.train import TrainingResult


@pytest.mark.parametrize(
    ("step", "steps", "said"),
    [
        (8, 8, "run r is done: {folder}"),
        (3, 8, "run r stopped at step 3 of 8: {folder}"),
        (10, 8, "run r is done: it was at step 10 already, and `training.steps` is 8: {folder}"),
    ],
)
def test_the_end_of_a_run_says_how_far_it_came_and_how_to_see_it_again(
    step: int,
    steps: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "my runs" / "r"
    folder.mkdir(parents=True)
    (folder / "leyden.db").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    result = TrainingResult("r", folder, step, steps, None, None, None, 1.0, updates=step)
    _print_result(result, argparse.Namespace(words=["train", "r.toml"]))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == said.format(folder=folder)
    assert last == "see it in the browser with: leyden serve --home 'my runs'"
