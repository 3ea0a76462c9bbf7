"""The worker of a local run: it is started again, which is printed, and not without end."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from leyden.client.worker.options import WorkerOptions
from leyden.config import Config, ConfigError
from leyden.config.schema import WorkerConfig
from leyden.local import worker_process
from leyden.local.worker_process import LocalWorker, worker_size


async def test_a_worker_that_keeps_dying_is_reported_each_time_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_process, "_MAX_DEATHS", 2)
    start = worker_process.LocalWorker._launch

    def start_and_kill(worker: worker_process.LocalWorker) -> worker_process.WorkerProcess:
        started = start(worker)
        os.kill(started.process.pid, signal.SIGKILL)
        return started

    monkeypatch.setattr(worker_process.LocalWorker, "_launch", start_and_kill)
    options = WorkerOptions(server="http://127.0.0.1:9", run="r", agent="agent.py:solve", base=str(tmp_path))
    async with LocalWorker(options, "key", tmp_path / "worker.log") as worker:
        with pytest.raises(ConfigError, match=r"keeps dying: the worker ended \(killed by SIGKILL\): it printed"):
            await worker.wait_failed()
    printed = capsys.readouterr().err
    assert printed.count("the worker ended (killed by SIGKILL)") == 1
    assert "worker.log); it is started again" in printed


async def test_a_stopped_worker_does_not_outlive_a_stop_that_is_cancelled(tmp_path: Path) -> None:
    options = WorkerOptions(server="http://127.0.0.1:9", run="r", agent="agent.py:solve", base=str(tmp_path))
    worker = LocalWorker(options, "key", tmp_path / "worker.log")
    await worker.start()
    worker._worker.process.send_signal(signal.SIGSTOP)
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait({stopping})
    try:
        assert worker._worker.status == -signal.SIGKILL
    finally:
        worker._worker.kill()


def config(deterministic: bool = False, **workers: int) -> Config:
    return Config(run="r", agent="a", tasks="t", deterministic=deterministic, workers=WorkerConfig(**workers))


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (6, 2), (16, 12), (128, 16)])
def test_agents_leave_cores_to_trainer_server_and_engine(cores: int, processes: int) -> None:
    assert worker_size(config(), cores) == (processes, 64)
    assert worker_size(config(), cores, on_gpu=True) == (processes, 256)


def test_what_is_configured_is_kept() -> None:
    assert worker_size(config(processes=3, concurrency=9), 16, on_gpu=True) == (3, 9)
    assert worker_size(config(concurrency=2), 16) == (2, 2)
    assert worker_size(config(processes=100), 16) == (100, 100)
    assert worker_size(config(deterministic=True), 16) == (1, 1)
    assert worker_size(config(deterministic=True, processes=3), 16) == (1, 1)
