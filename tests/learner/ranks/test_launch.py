"""Processes that torchrun has started are the ranks of the trainer among them."""

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from leyden.config import ConfigError, read_config
from leyden.learner.ranks import launch as launch_module
from leyden.learner.ranks.launch import JoinedProcess, LaunchedProcess, await_ranks, launch_of
from leyden.process.framing import to_frame

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "3",
}
JOIN = """
import os, socket, sys, time, types
from leyden.learner.ranks.launch import join, launch_of

def serve(compute, files):  # that of a rank imports transformers
    socket.socket(fileno=compute).send(b"compute")
    socket.socket(fileno=files).send(b"files")
    time.sleep(600)

sys.modules["leyden.learner.ranks.rank"] = types.SimpleNamespace(serve=serve)
join(launch_of(os.environ))
"""


def test_the_variables_of_torchrun_are_honoured() -> None:
    assert launch_of(TORCHRUN) == LaunchedProcess(1, 2, "127.0.0.1", 29500, "3")
    assert launch_of({}) is None and launch_of({**TORCHRUN, "WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigError, match="not by torchrun: unset them"):
        launch_of({"RANK": "1", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="several machines: start them on one"):
        launch_of({**TORCHRUN, "GROUP_WORLD_SIZE": "2"})


def test_each_process_of_torchrun_is_a_training_device() -> None:
    def config(**training: Any) -> Any:
        return read_config({"run": "r", "agent": "a:b", "tasks": "t", "training": training})

    launch = LaunchedProcess(0, 2, "127.0.0.1", 1)
    for given in ({}, {"devices": 2}):
        found = launch.configured(config(**given)).training
        assert (found.devices, found.restarts) == (2, 0)
    with pytest.raises(ConfigError, match=r"`training.devices` is 3, and torchrun has started 2 .*: leave it out"):
        launch.configured(config(devices=3))


async def test_a_process_joins_gets_the_sockets_of_a_rank_and_ends_with_the_trainer(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {**TORCHRUN, "MASTER_PORT": str(store.port)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", JOIN, env={**os.environ, **variables})
    found = await asyncio.to_thread(await_ranks, LaunchedProcess(0, 2, "127.0.0.1", store.port, "3"), tmp_path)
    joined = found[1]
    assert (list(found), joined.pid, joined.status) == ([1], process.pid, None)
    (compute, theirs), (files, others) = socket.socketpair(), socket.socketpair()
    joined.hand_over([theirs, others])
    theirs.close(), others.close()
    assert await asyncio.to_thread(compute.recv, 9) == b"compute" and await asyncio.to_thread(files.recv, 9) == b"files"
    joined.kill()
    assert await process.wait() == 0  # torchrun is to report the trainer's status only
    assert await joined.wait() == joined.status == 1
    compute.close(), files.close()


def test_a_process_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_TIMEOUT_S", 0.1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=r"rank 1, 2 did not come within .*: its output says why"):
        await_ranks(LaunchedProcess(0, 3, "127.0.0.1", store.port), tmp_path)


async def test_the_end_of_a_process_that_joined_is_seen() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(to_frame(b'{"rank": 2, "pid": 9}'))
    joined = JoinedProcess(ours)
    joined.hand_over([])
    assert (joined.rank, joined.pid, joined.status) == (2, 9, None)
    theirs.close()
    await joined.wait()
    assert joined.status is not None
    ours.close()
