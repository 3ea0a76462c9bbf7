"""The worker of a local run: it is started again, which is printed, and not without end."""

import os
import signal
from pathlib import Path

import pytest

from leyden.client.worker.worker import WorkerOptions
from leyden.config import ConfigError
from leyden.local import worker_process
from leyden.local.worker_process import running_worker


async def test_a_worker_that_keeps_dying_is_reported_each_time_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_process, "_MAX_DEATHS", 2)
    start = worker_process.LocalWorker._start

    def start_and_kill(worker: worker_process.LocalWorker) -> worker_process.WorkerProcess:
        started = start(worker)
        os.kill(started.process.pid, signal.SIGKILL)
        return started

    monkeypatch.setattr(worker_process.LocalWorker, "_start", start_and_kill)
    options = WorkerOptions(server="http://127.0.0.1:9", run="r", agent="agent.py:solve", base=str(tmp_path))
    async with running_worker(options, "key", tmp_path / "worker.log") as worker:
        with pytest.raises(ConfigError, match=r"keeps dying: the worker ended \(killed by SIGKILL\): it printed"):
            await worker.wait_failed()
    printed = capsys.readouterr().err
    assert printed.count("the worker ended (killed by SIGKILL)") == 1
    assert "worker.log); it is started again" in printed
