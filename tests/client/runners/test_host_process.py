"""A host ends when its connection to the worker is corrupt; one that cannot be started leaves nothing open."""

import asyncio
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from worker_harness import AGENTS

from leyden.client.host_protocol import HostSetup
from leyden.client.isolation.options import SandboxUnavailable
from leyden.client.runners import host_process
from leyden.client.runners.host_process import AGENT_HOST, HostProcess

SETUP = HostSetup(
    agent="hanging.py:act",
    base=str(AGENTS),
    path=(),
    server="http://127.0.0.1:1",
    key="key",
    concurrency=1,
    has_reward_function=False,
)


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
