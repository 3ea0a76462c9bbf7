"""`leyden demo` is the same in a clone and from a wheel."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from leyden.cli import demo, main


def test_a_demo_that_was_stopped_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def train(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(step=22, steps=60, after=0.8)  # of the evaluation after step 12

    monkeypatch.setattr("leyden.local.train.train", train)
    assert main(["demo"]) == 0
    assert capsys.readouterr().out.endswith("stopped at step 22 of 60: leyden demo starts anew\n")


def test_the_paths_of_the_printed_commands_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (demo.FOLDER.parents[1], demo.FOLDER, tmp_path):
        monkeypatch.chdir(folder)
        words = [word for command, _ in demo.next_commands(tmp_path) for word in command.split()]
        paths = [Path(word) for word in words if word.endswith((".toml", ".jsonl")) or "/" in word]
        assert {path.name for path in paths} >= {"calc.toml", "unseen.jsonl"}
        assert all(path.exists() for path in paths), paths
