"""The folder of a run: what a start that fails leaves behind."""

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from leyden.config import Config, ConfigError
from leyden.runs.run_folder import RunFolder


def fail(folder: RunFolder, config: Config, *files: str) -> None:
    """Start in the folder and fail after these files were written."""
    with pytest.raises(ConfigError, match="port"), folder.acquire(config):
        for name in files:
            (folder.path / name).touch()
        raise ConfigError("the port is taken")


def test_a_start_that_fails_before_there_is_a_store_leaves_no_new_folder(tmp_path: Path) -> None:
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path / "runs"))
    (tmp_path / "a.py").write_text("def solve(task): ...")
    folder = RunFolder.of(config)
    fail(folder, config, "server.log")
    assert not folder.path.exists()
    fail(folder, config, "leyden.db")
    assert folder.config_file.exists()
    (folder.path / "leyden.db").unlink()
    fail(folder, config)
    assert folder.config_file.exists()  # the folder is of an earlier start


@pytest.mark.parametrize("mode", [None, 0o755], ids=["new", "opened to others"])
def test_other_users_cannot_open_the_folder_of_a_run(tmp_path: Path, mode: int | None) -> None:
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path / "runs"))
    (tmp_path / "a.py").write_text("def solve(task): ...")
    folder = RunFolder.of(config)
    if mode is not None:
        with folder.acquire(config):
            pass
        folder.path.chmod(mode)
    with folder.acquire(config):
        assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_start_that_another_was_faster_than_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path / "runs"))
    folder = RunFolder.of(config)

    @contextmanager
    def lost(self: RunFolder) -> Iterator[None]:
        self.path.mkdir(parents=True)  # by the other, after this one looked
        raise ConfigError("another process uses it")
        yield

    monkeypatch.setattr(RunFolder, "lock", lost)
    with pytest.raises(ConfigError, match="another process"), folder.acquire(config):
        pass
    assert folder.path.exists()


def test_a_start_waits_for_who_only_asks_whether_the_run_is_held(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "mine")
    with folder.lock():
        pass
    with (folder.path / "lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        released = threading.Timer(0.02, fcntl.flock, (asking, fcntl.LOCK_UN))
        released.start()
        with folder.lock():
            pass
        released.join()
