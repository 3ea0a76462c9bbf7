"""The folder of a run: what a start that fails leaves behind."""

from pathlib import Path

import pytest

from leyden.config import Config, ConfigError
from leyden.local.run_folder import RunFolder


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
