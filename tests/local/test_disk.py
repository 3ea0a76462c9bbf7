"""A disk that is full, and files that were damaged: one line each, nothing lost, and a run that goes on."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainings import Training, children, line_with


def limit_files(pid: int, size: int | None) -> None:
    """Let a process write no file beyond a size, as if its disk were full; None lifts the limit."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if size is None else size, hard))


def leyden(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leyden.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run whose disk was full while rollouts were recorded and while a checkpoint was written."""
    training = Training(tmp_path_factory.mktemp("filled"), "held_out=0", "training.steps=2", "checkpoints.every=1")
    (training.folder / "slow").touch()
    process = training.start()
    line_with(process, "dashboard")
    while not (servers := children(process.pid, "leyden.server")):
        time.sleep(0.05)
    limit_files(servers[0], 4096)
    limit_files(process.pid, 1 << 20)
    (training.folder / "slow").unlink()
    waiting = line_with(process, "waiting for the server")
    assert "the store could not commit" in waiting
    limit_files(servers[0], None)
    assert line_with(process, "waiting for room").startswith("the checkpoint of step 1 cannot be written")
    limit_files(process.pid, None)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "Traceback" not in printed
    return training


def test_a_run_goes_on_when_there_is_room_and_nothing_is_missing(filled: Training) -> None:
    for line in filled.journal():
        assert line["rollouts/asked"] == line["rollouts/succeeded"] == 6
    assert (filled.run / "step-2").exists()
    log = (filled.run / "server.log").read_text()
    assert log.count("the store cannot commit") == log.count("the store commits again") == 1
    assert "Traceback" not in log


def test_check_says_what_is_damaged(filled: Training) -> None:
    sound = leyden(filled.folder, "check", "small", "--json")
    assert sound.returncode == 0, sound.stderr
    assert [part["name"] for part in json.loads(sound.stdout)] == ["leyden.db", "records", "step-1", "step-2"]
    assert "checksums match" in json.loads(sound.stdout)[0]["detail"]
    weights, database = filled.run / "step-2" / "model.safetensors", filled.run / "leyden.db"
    whole, recorded = weights.read_bytes(), database.read_bytes()
    weights.write_bytes(whole[:-1])
    at = recorded.index(b"plus")
    database.write_bytes(recorded[:at] + b"\xff\xff" + recorded[at + 2 :])
    damaged = leyden(filled.folder, "check", "small")
    refused = leyden(filled.folder, "train", "small.toml", *filled.settings, "training.steps=3")
    assert damaged.returncode == 1
    assert "changed since it was closed: " in damaged.stdout
    assert "cannot be read" in damaged.stdout
    assert f"model.safetensors has {len(whole) - 1} bytes instead of {len(whole)}" in damaged.stdout
    assert damaged.stderr == "leyden: damaged: leyden.db, records, step-2\n"
    assert refused.returncode == 1 and "was damaged after it was closed" in refused.stderr
    assert "the checkpoint step-2 is damaged" in refused.stderr and "resuming small after step 1" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_start_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    Training(tmp_path)
    command = "ulimit -f 0; exec " + f"{sys.executable} -m leyden.cli train small.toml"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("leyden: ") and "Traceback" not in done.stderr
