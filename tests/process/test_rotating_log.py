"""Logs of child processes keep the end of the output within a limit."""

import os
import subprocess
import sys
from pathlib import Path

from leyden.process.rotating_log import RotatingLog


def write(log: RotatingLog, code: str) -> None:
    pipe = log.open()
    try:
        subprocess.run([sys.executable, "-c", code], stdout=pipe, check=True)
    finally:
        os.close(pipe)


def test_a_log_is_rotated_and_keeps_the_end(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "worker.log", max_bytes=100_000)
    write(log, "for n in range(100_000): print(f'line {n}')")
    assert log.last_line() == "line 99999"
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["worker.log", "worker.log.1"]
    assert all((tmp_path / name).stat().st_size <= 100_000 for name in files)
    kept = "".join((tmp_path / name).read_text() for name in reversed(files)).splitlines()
    assert kept[-1000:] == [f"line {n}" for n in range(99_000, 100_000)]


def test_a_log_continues_after_a_restart_and_its_tail_is_of_the_last_process(tmp_path: Path) -> None:
    file = tmp_path / "worker.log"
    file.write_text("earlier\n")
    log = RotatingLog(file)
    os.close(RotatingLog(tmp_path / "quiet.log").open())
    assert (tmp_path / "quiet.log").read_bytes() == b""
    write(log, "print('first')")
    assert log.last_line() == "first"
    write(log, "pass")
    assert log.last_line() is None
    assert file.read_text() == "earlier\nfirst\n"


def test_a_log_that_cannot_be_written_blocks_nobody(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "missing" / "worker.log")
    write(log, "print('x' * 1_000_000 + '\\nlast')")
    assert log.last_line() == "last"
