"""What a run lives through: a full disk, an agent that fails, damaged files; and how it is checked, pruned and deleted.

The tests share one run, in this order.
"""

import asyncio
import json
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from trainings import AGENT, Training, children, line_with

from leyden.cli import main
from leyden.config import ConfigError
from leyden.runs.pruning import prune_run

FAILING = AGENT.replace(
    "def solve(task):\n",
    'def solve(task):\n    print("solving", task["question"])\n    if "3 plus" not in task["question"]:\n'
    '        raise KeyError("unknown number")\n',
)


class Finished(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Finished]


@pytest.fixture
def leyden(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in a folder, in this process."""

    def run(folder: Path, *arguments: str) -> Finished:
        monkeypatch.chdir(folder)
        capfd.readouterr()
        status = main(arguments)
        return Finished(status, *capfd.readouterr())

    return run


def limit_files(pid: int, size: int | None) -> None:
    """Let a process write no file beyond a size, as if its disk were full; None lifts the limit."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if size is None else size, hard))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run whose disk was full while rollouts were recorded and while a checkpoint was written.

    Its agent raises on seven of eight tasks.
    """
    settings = ("held_out=0", "training.tasks_per_step=1", "training.steps=2", "checkpoints.every=1")
    training = Training(tmp_path_factory.mktemp("trained"), *settings)
    (training.folder / "agent.py").write_text(FAILING)
    process = training.start()
    line_with(process, "dashboard")
    while not (servers := children(process.pid, "leyden.server")):
        time.sleep(0.05)
    limit_files(servers[0], 4096)
    limit_files(process.pid, 1 << 20)
    log = training.run / "server.log"
    while "the store cannot commit" not in log.read_text():  # the trainer may have queued its rollouts before the limit
        time.sleep(0.05)
    limit_files(servers[0], None)
    assert line_with(process, "waiting for room").startswith("the checkpoint of step 1 cannot be written")
    limit_files(process.pid, None)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "Traceback" not in printed
    return training


def test_a_full_disk_holds_a_run_up_and_nothing_is_lost(trained: Training) -> None:
    for line in trained.metrics():
        assert line["rollouts/requested"] == line["rollouts/succeeded"] + line["rollouts/agent_error"]
    assert (trained.run / "step-2").exists()
    log = (trained.run / "server.log").read_text()
    assert log.count("the store cannot commit") == log.count("the store commits again") == 1
    assert "Traceback" not in log


def test_an_agent_that_raises_on_some_tasks_trains_on_the_others(trained: Training) -> None:
    lines = trained.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollouts/succeeded"] >= 3 and line["rollouts/agent_error"] >= 3 for line in lines)
    assert all(line["rollouts/trained"] >= 3 for line in lines)


def outputs(run: Path) -> int:
    with closing(sqlite3.connect(run / "leyden.db")) as database:
        found = database.execute("SELECT COUNT(*) FROM attempts WHERE output IS NOT NULL").fetchone()
        return int(found[0])


def test_a_run_is_checked_measured_and_pruned(trained: Training, leyden: Command) -> None:
    sound = leyden(trained.folder, "check", "small", "--json")
    assert sound.returncode == 0, sound.stderr
    assert [part["name"] for part in json.loads(sound.stdout)] == ["leyden.db", "records", "step-1", "step-2"]
    assert "checksums match" in json.loads(sound.stdout)[2]["detail"]
    (listed,) = json.loads(leyden(trained.folder, "runs", "--json").stdout)
    assert listed["bytes"] > sum(file.stat().st_size for file in trained.run.rglob("*.safetensors"))
    archived = trained.run.with_name("small.before-20260101-000000")
    shutil.copytree(trained.run, archived)
    for run in (trained.run, archived):
        assert outputs(run)
        pruned = leyden(trained.folder, "prune", run.name, "--output", "--spans", "--json")
        assert pruned.returncode == 0, pruned.stderr
        assert not outputs(run) and len(list(run.glob("step-*"))) == 2
    shutil.rmtree(archived)
    pruned = leyden(trained.folder, "prune", "small", "--keep", "2")
    assert pruned.returncode == 0 and len(list(trained.run.glob("step-*"))) == 2
    with pytest.raises(ConfigError, match="keep at least 1"):
        asyncio.run(prune_run(trained.run, keep=0))
    assert len(list(trained.run.glob("step-*"))) == 2


def test_what_is_damaged_is_named_and_the_checkpoint_before_is_used(trained: Training, leyden: Command) -> None:
    weights, database = trained.run / "step-2" / "model.safetensors", trained.run / "leyden.db"
    whole, recorded = weights.read_bytes(), database.read_bytes()
    weights.write_bytes(whole[:-1])
    at = recorded.index(b"plus")
    database.write_bytes(recorded[:at] + b"\xff\xff" + recorded[at + 2 :])
    damaged = leyden(trained.folder, "check", "small")
    database.write_bytes(recorded[: len(recorded) // 2])
    refused = leyden(trained.folder, "train", "small.toml", *trained.settings, "training.steps=3")
    assert damaged.returncode == 1
    assert "cannot be read" in damaged.stdout
    assert f"model.safetensors has {len(whole) - 1} bytes instead of {len(whole)}" in damaged.stdout
    assert damaged.stderr == "leyden: damaged: records, step-2\n"
    assert refused.returncode == 1 and "is corrupt and was left untouched" in refused.stderr
    assert "the checkpoint step-2 is damaged" in refused.stderr and "resuming small after step 1" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_deleted_run_is_gone(trained: Training, leyden: Command) -> None:
    unasked = leyden(trained.folder, "delete", "small")
    assert unasked.returncode == 1 and "--yes" in unasked.stderr and trained.run.exists()
    deleted = leyden(trained.folder, "delete", "small", "--yes")
    assert deleted.returncode == 0 and "small is deleted" in deleted.stdout
    assert not trained.run.exists()
    assert leyden(trained.folder, "delete", "small", "--yes").returncode == 1


@pytest.mark.parametrize("command", ["serve --port 0", pytest.param("train small.toml", marks=pytest.mark.slow)])
def test_a_start_on_a_full_disk_is_one_line(tmp_path: Path, command: str) -> None:
    Training(tmp_path)
    limited = f"ulimit -f 0; exec {sys.executable} -m leyden {command}"
    done = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("leyden: ") and "Traceback" not in done.stderr
