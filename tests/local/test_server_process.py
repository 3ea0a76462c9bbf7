"""The server of a local run: it is started again at the same address, and not without end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from modelserving import eventually
from msgspec.structs import replace
from serving import delete_store

from leyden.api.client import RemoteError, ServerUnreachable
from leyden.api.wire import GroupSpec, LeaseRequest, RunSpec
from leyden.engine.torch.engine import TorchEngine
from leyden.learner.errors import TrainingError
from leyden.learner.loading import load_model
from leyden.local import server_process
from leyden.local.server_process import LocalServer
from leyden.local.stack import trainer_remote
from leyden.models.source import BUNDLED, find_model
from leyden.records import DEFAULT_POLICY, RunSettings, Task, Version
from leyden.server.options import ServedPolicy, ServeOptions, ServerProcessOptions
from leyden.store.store import Store


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TorchEngine]:
    running = TorchEngine(load_model(find_model("spark", str(tmp_path)), "float32"))
    yield running
    running.close()


@pytest.fixture
def options(engine: TorchEngine, tmp_path: Path) -> ServerProcessOptions:
    model = str(BUNDLED["spark"])
    policy = ServedPolicy(DEFAULT_POLICY, model, "spark", engine.address)
    return ServerProcessOptions(ServeOptions(tmp_path), (policy,))


@pytest.fixture
async def server(
    options: ServerProcessOptions, engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalServer]:
    """A server that may die once, of a training that continues one that was killed when group g was queued."""
    monkeypatch.setattr(server_process, "_MAX_DEATHS", 2)
    store = await Store(tmp_path / "leyden.db").start()
    await store.create_run(RunSpec("r", RunSettings()))
    await store.enqueue("r", GroupSpec("g", Task("t", {})))
    await store.close()
    async with LocalServer(replace(options, park="r"), {DEFAULT_POLICY: engine}, tmp_path / "server.log") as running:
        yield running


def kill_process(server: LocalServer) -> None:
    os.kill(server._process.pid, signal.SIGKILL)


async def test_a_request_waits_for_a_server_that_is_started_again_until_there_is_none(
    server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with trainer_remote(server, tmp_path) as remote:
        assert await remote.lease(LeaseRequest("w")) == []  # until the training requests the group
        await remote.enqueue("r", GroupSpec("g", Task("t", {})))
        (lease,) = await remote.lease(LeaseRequest("w"))
        with server.starting_held(DEFAULT_POLICY):
            kill_process(server)
            await server._process.wait()
            summary = await remote.summarise_run("r")  # of the next process
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
                await remote.summarise_run("r")
        with pytest.raises(TrainingError, match="the server keeps dying: the server ended"):
            await server.wait_failed()


@pytest.mark.parametrize("dies_first", [False, True])
async def test_a_server_whose_store_was_deleted_is_not_started_with_an_empty_one(
    server: LocalServer, tmp_path: Path, dies_first: bool
) -> None:
    async with trainer_remote(server, tmp_path) as remote:
        delete_store(tmp_path)
        if dies_first:
            kill_process(server)
        with pytest.raises((RemoteError, ServerUnreachable)):
            await remote.enqueue("r", GroupSpec("g", Task("t", {})))
        with pytest.raises(TrainingError, match=r"leyden\.db is gone") as ended:
            await server.wait_failed()
        assert "\n" not in str(ended.value)
    assert not (tmp_path / "leyden.db").exists()


async def test_a_server_that_dies_before_it_listens_is_started_again(
    options: ServerProcessOptions, engine: TorchEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = LocalServer(options, {DEFAULT_POLICY: engine}, tmp_path / "server.log")
    starting = asyncio.create_task(server.start())
    await eventually(lambda: hasattr(server, "_process"))
    kill_process(server)
    await starting
    assert "the server did not start (killed by SIGKILL)" in capsys.readouterr().err
    await server.stop()


async def test_a_server_that_does_not_answer_is_killed_and_started_again(
    server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = server._process.pid
    monkeypatch.setattr(server_process, "_INTERVAL_S", 0.05)
    monkeypatch.setattr(server_process, "_MAX_SILENT_S", 0.2)
    monkeypatch.setattr(server_process, "_answers", lambda url: server._process.pid != frozen)
    async with asyncio.timeout(120):
        while server._process.pid == frozen or "it is started again" not in capsys.readouterr().err:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    async with trainer_remote(server, tmp_path) as remote:
        assert [run.id for run in await remote.list_runs()] == ["r"]
    assert "(most recent call first)" in (tmp_path / "server.log").read_text()
