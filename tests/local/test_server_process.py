"""The server of a local run: it is started again at the same address, and not without end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leyden.engine.torch.engine import TorchEngine
from leyden.local import server_process
from leyden.local.retrying_remote import RetryingRemote
from leyden.local.server_process import LocalServer, running_server
from leyden.local.stack import admin_key
from leyden.records import DEFAULT_POLICY, RunSettings, Task, Version
from leyden.remote import ServerUnreachable
from leyden.server.options import ServeOptions, ServerProcessOptions
from leyden.trainer.errors import TrainingError
from leyden.trainer.policy.loading import BUNDLED, find_model, load_model
from leyden.wire import GroupSpec, LeaseRequest, RunSpec


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LocalServer]:
    source = find_model("spark", str(tmp_path))
    engine = TorchEngine(load_model(source, "float32", training=False))
    options = ServerProcessOptions(
        ServeOptions(tmp_path, port=0), DEFAULT_POLICY, str(BUNDLED["spark"]), "spark", engine.address
    )
    async with running_server(options, engine, tmp_path / "server.log") as running:
        yield running
    engine.close()


def kill_process(server: LocalServer) -> None:
    os.kill(server._process.pid, signal.SIGKILL)


async def test_a_request_waits_for_a_server_that_is_started_again_until_there_is_none(
    server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_process, "_MAX_DEATHS", 2)
    async with RetryingRemote(server.running.url, admin_key(tmp_path), lambda: server.is_gone) as remote:
        await remote.create_run(RunSpec("r", RunSettings()))
        await remote.enqueue("r", GroupSpec("g", Task("t", {})))
        (lease,) = await remote.lease(LeaseRequest("w"))
        with server.starting_held():
            kill_process(server)
            await server._process.wait()
            summary = await remote.summary("r")  # of the next process
        assert summary.rollouts == {"queued": 1}  # its call might have failed with the server: released, uncharged
        assert server.running.url == remote.url
        assert "the server ended (killed by SIGKILL)" in (printed := capsys.readouterr().err)
        assert "it is started again" in printed
        (again,) = await remote.lease(LeaseRequest("w"))
        assert again.attempt.rollout == lease.attempt.rollout

        call = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        headers = {"authorization": f"Bearer {again.key}"}
        calling = asyncio.create_task(
            remote._session.post(f"{remote.url}/v1/chat/completions", json=call, headers=headers)
        )
        assert (await remote.hold_calls("r", DEFAULT_POLICY)).waiting == 0
        done, _ = await asyncio.wait({calling}, timeout=0.5)
        assert not done  # the server was started while the weights changed
        await remote.publish_version("r", Version(DEFAULT_POLICY, 1))
        assert (await calling).status == 200

        kill_process(server)
        with pytest.raises(ServerUnreachable):
            while True:
                await remote.summary("r")
        with pytest.raises(TrainingError, match="the server keeps dying: the server ended"):
            await server.wait_failed()
