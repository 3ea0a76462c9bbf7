"""What the name of a run means."""

import os
from pathlib import Path

import pytest

from leyden.config import ConfigError
from leyden.runs.run_checkpoints import require_run_folder
from leyden.runs.run_names import FolderRuns, denied, may_have, name_runs
from leyden.runs.stored_runs import open_run, open_stores
from leyden.store.errors import StoreUnusable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run."""
    (tmp_path / "calc").mkdir()
    (tmp_path / "calc" / "config.toml").touch()
    return tmp_path / "calc"


def test_a_run_without_a_folder_is_called_by_its_id() -> None:
    assert name_runs(None, ["calc", "other"]) == FolderRuns({"calc": "calc", "other": "other"})


@pytest.mark.parametrize("id", ["calc", "sums"])
def test_a_run_with_a_folder_is_called_by_the_folder_whatever_its_id(folder: Path, id: str) -> None:
    assert name_runs(folder, [id]) == FolderRuns({"calc": id}, "calc")


def test_a_name_that_the_home_folders_store_has_is_not_given_twice(folder: Path) -> None:
    assert name_runs(folder, ["calc"], taken=["calc"]) == FolderRuns({"calc:calc": "calc"}, "calc:calc")


def test_other_runs_of_a_folders_store_have_its_name_before_their_own(folder: Path) -> None:
    assert name_runs(folder, ["sums", "calc"]) == FolderRuns({"calc:sums": "sums", "calc": "calc"}, "calc")
    assert name_runs(folder, ["a", "b"]) == FolderRuns({"calc:a": "a", "calc:b": "b"})
    (folder / "config.toml").unlink()
    assert name_runs(folder, ["sums"]) == FolderRuns({"calc:sums": "sums"})
    assert name_runs(folder, ["calc"]) == FolderRuns({"calc": "calc"})


def test_of_several_runs_in_its_store_a_folder_is_that_of_the_one_in_its_configuration(folder: Path) -> None:
    (folder / "config.toml").write_text('run = "b"')
    assert name_runs(folder, ["a", "b"]) == FolderRuns({"calc:a": "a", "calc": "b"}, "calc")
    assert name_runs(folder, ["calc", "b"]) == FolderRuns({"calc": "calc", "calc:b": "b"}, "calc")
    assert name_runs(folder, ["a", "c"]) == FolderRuns({"calc:a": "a", "calc:c": "c"})
    for unusable in ("run = ", "run = 5", "[run]"):
        (folder / "config.toml").write_text(unusable)
        assert name_runs(folder, ["a"]) == FolderRuns({"calc": "a"}, "calc")


def test_a_name_says_which_folders_may_have_its_run() -> None:
    folders = [Path("runs", name) for name in ("calc", "calc.before-1", "calc:a", "ca")]
    assert [folder.name for folder in may_have(folders, "calc:a")] == ["calc", "calc:a"]
    assert [folder.name for folder in may_have(folders, "calc.before-1")] == ["calc.before-1"]


def test_the_folder_of_another_user_is_denied_and_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    assert denied(tmp_path) is None
    # as root, who runs some tests, may open everything
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "theirs")
    message = f"{tmp_path}/theirs: permission denied"
    for run in (None, "theirs"):
        assert str(denied(tmp_path, run)).startswith(message)
    assert denied(tmp_path, "mine") is None
    with pytest.raises(StoreUnusable, match=message), open_stores(tmp_path):
        pass
    with pytest.raises(StoreUnusable, match=message), open_run(tmp_path, "theirs"):
        pass
    with pytest.raises(ConfigError, match=message):
        require_run_folder(tmp_path, "theirs")
