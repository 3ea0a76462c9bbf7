"""Nothing that a worker does is lost while its server is down."""

import asyncio
import os
from pathlib import Path

import pytest
from psutil import Process
from serving import ServerProcess
from worker_harness import AGENTS

from leyden.api.client import Remote
from leyden.api.wire import EventCursor, GroupSpec, RunSpec
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.process import WorkerProcess
from leyden.records import RunSettings, Task
from leyden.server.control.keys import KeyKind


async def test_an_attempt_outlives_its_server_and_a_bad_key_ends_a_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"  # two, for one could be read to the end of what both say
    for pipe in (begun, go):
        os.mkfifo(pipe)
    with ServerProcess(tmp_path / "home") as server:
        async with Remote(server.url, server.admin_key) as remote:
            await remote.create_run(RunSpec("r", RunSettings(lease_s=5.0)))
            await remote.enqueue("r", GroupSpec("g", Task("t", {"do": "wait", "files": [str(begun), str(go)]})))
            options = WorkerOptions(server=server.url, run="r", agent="moody.py:act", base=str(AGENTS))
            worker = WorkerProcess(options, server.key(KeyKind.WORKER, run="r"))
            assert not any("moody" in word for word in Process(worker.process.pid).cmdline())  # others can read it
            await asyncio.to_thread(begun.write_text, "begun?")  # returns when the agent reads
            server.kill()
            await asyncio.to_thread(go.write_text, "go on")
            await asyncio.sleep(1.0)  # the agent returns, and nobody is there to hear of it
            printed = ""
            while "no answer from the server" not in printed:
                await asyncio.sleep(0.05)
                printed += capfd.readouterr().err
            await asyncio.to_thread(server.start)
            log = await remote.follow_events("r", EventCursor(0, wait=30, kind="group.finished"))
            assert log.events
            (episode,) = await remote.group_episodes("r", "g")
            await remote.enqueue("r", GroupSpec("h", Task("t2", {"do": "return", "value": 1.0})))
            assert (await remote.follow_events("r", EventCursor(log.after, wait=30, kind="group.finished"))).events
            worker.stop()
            assert await asyncio.to_thread(worker.process.wait, 60) == 0
            stranger = WorkerProcess(options, "leyden-nonsense.0")
            assert await asyncio.to_thread(stranger.process.wait, 60) == 2
    assert (episode.attempt.number, episode.final_reward(0.0)) == (1, 1.0)
    said = [line for line in (printed + capfd.readouterr().err).splitlines() if "leyden.server" not in line]
    assert [line for line in said if "no answer from the server" in line] and [
        line for line in said if "answers again" in line
    ]
    assert len(said) <= 4
    assert said[-1].startswith("leyden worker: this is not a key of this server")
