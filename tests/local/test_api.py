"""The arguments of `leyden.train` make the same configuration as a file with those keys."""

from pathlib import Path

import pytest

from leyden.local.api import build_config


def test_an_old_key_as_an_argument_replaces_the_new_one_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "calc.toml"
    path.write_text('agent = "a"\ntasks = "t"\n[workers]\nprocesses = 2\nconcurrency = 9\n')
    config = build_config(path, home=str(tmp_path), workers={"hosts": 3})
    assert (config.workers.processes, config.workers.concurrency) == (3, 9)
    assert [record.getMessage() for record in caplog.records] == [
        "`workers.hosts` is now `workers.processes`; the old name still works"
    ]
