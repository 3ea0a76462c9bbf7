"""`leyden worker`: what it passes on to the worker that it runs."""

import subprocess
from pathlib import Path

import pytest
from forked_commands import start_command
from serving import ServerProcess

from leyden.api.wire import FinishRequest
from leyden.cli import main, worker
from leyden.client.worker.options import WorkerOptions
from leyden.outcomes import Ending, Outcome
from leyden.records import final_rewards
from leyden.server.control.keys import KeyKind


def test_agents_do_not_see_the_file_of_the_key_and_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[WorkerOptions, str]] = []

    async def work(options: WorkerOptions, key: str, stop: object, on_end: object) -> None:
        found.append((options, key))

    monkeypatch.setattr(worker, "work", work)
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("def solve(task): ...")
    Path("tasks.jsonl").write_text('{"input": 1}\n')
    Path("mine.toml").write_text('agent = "agent.py:solve"\ntasks = "tasks.jsonl"\n')
    Path("worker.key").write_text("leyden-of-the-worker\n")
    command = ["worker", "mine.toml", "--server", "http://127.0.0.1:9", "--key-file", "worker.key"]
    assert main([*command, 'workers.environment=["INDEX"]']) == 0
    ((options, key),) = found
    assert key == "leyden-of-the-worker"
    assert options.hidden == (str(tmp_path / "runs"), str(tmp_path / "worker.key"))
    assert options.workers.environment == ("INDEX",)


def test_a_worker_says_once_that_its_run_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def solve(task): ...")
    (tmp_path / "tasks.jsonl").write_text('{"input": 1}\n')
    (tmp_path / "mine.toml").write_text('agent = "agent.py:solve"\ntasks = "tasks.jsonl"\n')
    with ServerProcess(tmp_path / "runs") as server:
        key = str(server.key_file(KeyKind.WORKER))
        words = ("worker", "mine.toml", "--server", server.url, "--key-file", key, "workers.processes=1")
        worker = start_command(*words, cwd=tmp_path, stderr=subprocess.PIPE)
        try:
            assert worker.stderr is not None
            lines = [worker.stderr.readline().decode() for _ in range(2)]
            worker.terminate()
            rest = worker.communicate(timeout=300)[1].decode()
        finally:
            worker.kill()
    assert lines[0].startswith(f"working for run mine at {server.url}")
    assert lines[1].startswith(f"waiting for run mine, which the server at {server.url} does not have: start its")
    assert "run=NAME" in lines[1]
    assert rest.splitlines() == ["stopped: 0 attempts"]


def test_an_attempt_counts_once_with_its_weighted_parts_and_failures_as_they_are_trained() -> None:
    progress = worker.WorkerProgress(failure_reward=-1.0)
    parts = tuple(final_rewards("r", {"right": 1.0, "short": 0.5}, "reward", {"short": 2.0}))
    progress.count(FinishRequest(Outcome(Ending.SUCCEEDED), rewards=parts))
    progress.count(FinishRequest(Outcome(Ending.AGENT_ERROR)))
    progress.count(FinishRequest(Outcome(Ending.LOST)))
    progress.close()
    assert str(progress) == "3 attempts: 1 succeeded, 1 agent error, 1 lost, mean reward 0.500"


def test_the_old_name_of_processes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["worker", "mine.toml", "--hosts", "2"])
    assert "--hosts" in capsys.readouterr().err
