"""Temporary folders are deleted when they are closed, and those of killed processes when another is made."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from leyden.process.temporary import TemporaryFolder

MAKE = (
    "from leyden.process.temporary import TemporaryFolder; made = TemporaryFolder('x'); print(made.path, flush=True); "
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_elsewhere(folder: Path, then: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", MAKE + then], stdout=subprocess.PIPE, text=True, env=environment)


def test_only_its_user_can_enter_it_and_it_is_deleted_when_it_is_closed() -> None:
    made = TemporaryFolder("engine")
    assert made.path.stat().st_mode & 0o777 == 0o700 and "engine" in made.path.name
    (made.path / "file").touch()
    made.close()
    made.close()
    assert not made.path.exists()


def test_the_next_one_deletes_that_of_a_killed_process_and_no_other(folder: Path) -> None:
    (folder / "leyden.of-somebody").symlink_to(folder / "kept")
    (folder / "kept").mkdir()
    with make_elsewhere(folder, "import time; time.sleep(600)") as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        first = TemporaryFolder("y")
        assert path.exists()
        (path / "weights").write_bytes(b"1" * 1000)
        process.send_signal(signal.SIGKILL)
        process.wait()
    second = TemporaryFolder("y")
    assert not path.exists()
    assert first.path.exists() and second.path.exists() and (folder / "kept").exists()
    second.close(), first.close()


def test_it_is_deleted_when_its_process_ends(folder: Path) -> None:
    with make_elsewhere(folder, "") as process:
        printed, _ = process.communicate()
    assert process.returncode == 0 and printed and not Path(printed.strip()).exists()
