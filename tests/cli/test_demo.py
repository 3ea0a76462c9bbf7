"""`leyden demo` is the same in a clone and from a wheel."""

from pathlib import Path

import pytest

from leyden.cli import demo


def test_the_paths_of_the_printed_commands_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (demo.FOLDER.parents[1], demo.FOLDER, tmp_path):
        monkeypatch.chdir(folder)
        words = [word for command, _ in demo.next_commands(tmp_path) for word in command.split()]
        paths = [Path(word) for word in words if word.endswith((".toml", ".jsonl")) or "/" in word]
        assert {path.name for path in paths} >= {"calc.toml", "unseen.jsonl"}
        assert all(path.exists() for path in paths), paths
