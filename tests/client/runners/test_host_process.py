"""A host reports the end of every attempt, and ends when its connection to the worker is corrupt."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from modelserving import eventually
from msgspec.structs import replace
from worker_harness import AGENTS

from leyden.api.wire import FinishRequest, Lease
from leyden.client.host_protocol import CodeReturned, HostSetup, StopAttempt
from leyden.client.isolation.launcher import Launch
from leyden.client.isolation.options import IsolationOptions, SandboxUnavailable
from leyden.client.runners import host_process
from leyden.client.runners.host_process import AGENT_HOST, HostProcess
from leyden.config.schema import RolloutConfig
from leyden.outcomes import Ending
from leyden.records import Attempt, Purpose, Task

SETUP = HostSetup(
    agent="hanging.py:act",
    base=str(AGENTS),
    path=(),
    server="http://127.0.0.1:1",
    key="key",
    concurrency=1,
    has_reward_function=False,
)


AGENT = """
import asyncio
import time

from opentelemetry import trace


async def solve(task):
    if task == "block":
        time.sleep(1)
    elif task == "wait":
        await asyncio.sleep(60)
    elif task == "trace":
        trace.get_tracer("agent").start_span("work").end()
    elif task == "leave a cancellation behind":
        trace.get_tracer("agent").start_span("work").end()  # nobody receives it, so that exporting it takes long
        asyncio.get_running_loop().call_later(0.3, asyncio.current_task().cancel)
    return task
"""


async def ends_of(folder: Path, *messages: Lease | StopAttempt) -> dict[str, FinishRequest]:
    """The ends that a host reports after some messages, which it receives at once."""
    (folder / "agent.py").write_text(AGENT)
    setup = replace(SETUP, agent="agent.py:solve", base=str(folder), concurrency=2)
    host = await HostProcess.start(AGENT_HOST, setup)
    ends: dict[str, FinishRequest] = {}
    try:
        for message in messages:
            host._stream.send(message)
        expected = {message.id if isinstance(message, Lease) else message.attempt for message in messages}
        async with asyncio.timeout(20):
            while ends.keys() < expected:
                event = await host._stream.receive()
                if isinstance(event, CodeReturned):
                    ends[event.attempt] = event.report
    finally:
        await host.close(kill=True)
    return ends


def start(attempt: str, task: Any) -> Lease:
    leased = Attempt(attempt, "r", attempt.partition(".")[0], 1, "w", None, 0.0, 60.0)
    traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    return Lease(leased, Task("t", task), Purpose.TRAIN, 60.0, "key", SETUP.server, traceparent)


async def test_an_attempt_that_is_stopped_before_it_begins_has_an_end(tmp_path: Path) -> None:
    ends = await ends_of(tmp_path, start("a.1", "block"), start("b.1", "wait"), StopAttempt("b.1"))
    assert ends["a.1"].outcome.ending is Ending.SUCCEEDED
    assert ends["b.1"].outcome.ending is Ending.CANCELLED


async def test_an_attempt_whose_task_is_cancelled_after_its_code_returned_has_its_result(tmp_path: Path) -> None:
    ends = await ends_of(tmp_path, start("a.1", "leave a cancellation behind"))
    assert ends["a.1"].outcome.ending is Ending.SUCCEEDED


DRAWS = """
import random

import numpy


def draw(task):
    return [random.random(), numpy.random.rand(), hash("text"), list({"some", "words", "in", "a", "set"})]
"""


async def test_with_fixed_seeds_every_attempt_of_a_task_draws_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    seeded = IsolationOptions(rollout=RolloutConfig(fixed_seeds=True))
    setup = replace(SETUP, agent="draws.py:draw", base=str(tmp_path), isolation=seeded)
    drawn: dict[str, list[str]] = {"t": [], "u": []}
    for process in range(2):
        host = await HostProcess.start(AGENT_HOST, setup)
        ended: asyncio.Queue[object] = asyncio.Queue()
        listening = asyncio.create_task(host.listen(ended.put_nowait))
        try:
            for task in ("t", "u", "t"):
                host._stream.send(start(f"{task}.{process}", task))
                async with asyncio.timeout(60):
                    end = await ended.get()
                assert isinstance(end, CodeReturned) and end.report.outcome.ending is Ending.SUCCEEDED, end
                drawn[task].append(repr(end.report.result))
        finally:
            listening.cancel()
            await host.close(kill=True)
    assert len(set(drawn["t"])) == len(set(drawn["u"])) == 1
    assert drawn["t"][0] != drawn["u"][0]


async def test_a_host_whose_agents_hold_too_much_shared_memory_is_killed_and_says_so() -> None:
    host = await HostProcess.start(
        AGENT_HOST,
        replace(SETUP, agent="hoarding.py:act", isolation=IsolationOptions(rollout=RolloutConfig(memory_mb=400))),
    )
    try:
        host._stream.send(start("a.1", {"shared_mb": 500}))
        async with asyncio.timeout(60):
            await host.listen(lambda event: None)
            reason = await host.exit_reason()
    finally:
        await host.close(kill=True)
    assert reason == "killed by SIGKILL\nits processes together held more than 400 MB of memory (`memory_mb`)"


async def test_an_end_and_the_reply_to_a_stop_do_not_wait_for_spans(tmp_path: Path) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    (tmp_path / "agent.py").write_text(AGENT)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    setup = replace(SETUP, agent="agent.py:solve", base=str(tmp_path), server=address)
    host = await HostProcess.start(AGENT_HOST, setup)
    ends: asyncio.Queue[CodeReturned] = asyncio.Queue()
    listening = asyncio.create_task(host.listen(ends.put_nowait))
    try:
        async with asyncio.timeout(20):  # an export may take 30 s
            host._stream.send(start("a.1", "trace"))
            assert (await ends.get()).has_spans
            flushing = asyncio.create_task(host.flush_spans("a.1"))
            await asked.wait()
            stopped = await host.stop("a.1")
            assert stopped is not None and stopped.has_spans and not flushing.done()
            answer.set()
            await flushing
    finally:
        await host.close(kill=True)
        await listening
        server.close()


async def test_what_is_asked_of_a_host_that_has_died_is_answered_at_once() -> None:
    host = await HostProcess.start(AGENT_HOST, SETUP)
    listening = asyncio.create_task(host.listen(lambda event: None))
    flushing = asyncio.create_task(host.flush_spans("a.1"))
    await host.close(kill=True)
    async with asyncio.timeout(20):  # spans are awaited for 30 s
        await listening
        await flushing
        await host.flush_spans("a.1")
    assert await host.is_responsive(20)  # nothing blocks it


async def test_a_host_ends_when_it_receives_a_frame_over_the_limit() -> None:
    host = await HostProcess.start(AGENT_HOST, SETUP, keep_output=True)
    try:
        host._stream._writer.write(b"\xff" * 8)
        async with asyncio.timeout(30):
            assert await host.exit_reason() == "exit status 1"
        assert "FrameTooLarge" in host.output()
    finally:
        await host.close(kill=True)


async def test_a_host_whose_process_cannot_be_started_leaves_no_descriptor_open() -> None:
    too_long = replace(SETUP, key="k" * 2**20)  # for a variable of the environment
    with pytest.raises(OSError, match="too long"):  # once before, for what the event loop opens
        await HostProcess.start(AGENT_HOST, too_long, keep_output=True)
    await asyncio.sleep(0)  # transports close their sockets in the next iteration
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="too long"):
        await HostProcess.start(AGENT_HOST, too_long, keep_output=True)
    await asyncio.sleep(0)
    assert psutil.Process().num_fds() == before


async def test_a_host_that_cannot_be_isolated_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise SandboxUnavailable("no sandbox here")

    monkeypatch.setattr(host_process, "launch", refuse)
    before = psutil.Process().num_fds()
    with pytest.raises(SandboxUnavailable):
        await HostProcess.start(AGENT_HOST, SETUP, keep_output=True)
    assert psutil.Process().num_fds() == before


async def test_a_worker_goes_on_while_the_scratch_folder_of_a_host_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    removing, went_on = threading.Event(), threading.Event()
    found: list[bool] = []

    class SlowLaunch(Launch, frozen=True):
        def release(self) -> None:
            removing.set()
            found.append(went_on.wait(20))

    def launch(options: Any, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> Launch:
        return SlowLaunch(command, environment)

    monkeypatch.setattr(host_process, "launch", launch)
    host = await HostProcess.start(AGENT_HOST, SETUP)
    closing = asyncio.create_task(host.close(kill=True))
    await eventually(removing.is_set)
    went_on.set()
    await closing
    assert found == [True]


async def test_more_hosts_than_the_event_loop_has_threads_are_ended_one_by_one() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    hosts = [await HostProcess.start(AGENT_HOST, SETUP) for _ in range(2)]
    try:
        async with asyncio.timeout(30):
            await hosts[1].close(kill=True)
    finally:
        for host in hosts:
            await host.close(kill=True)
