"""A host process ends when its connection to the worker is corrupt, instead of running on out of reach."""

import asyncio

from worker_harness import AGENTS

from leyden.client.host_protocol import HostSetup
from leyden.client.runners.host_process import HostProcess


async def test_a_host_ends_when_it_receives_a_frame_over_the_limit() -> None:
    setup = HostSetup(
        agent="hanging.py:act",
        base=str(AGENTS),
        path=(),
        server="http://127.0.0.1:1",
        key="key",
        concurrency=1,
        has_reward_function=False,
    )
    host = await HostProcess.start("leyden.client.host.main", setup, keep_output=True)
    try:
        host._stream._writer.write(b"\xff" * 8)
        async with asyncio.timeout(30):
            assert await host.exit_reason() == "exit status 1"
        assert "FrameTooLarge" in host.output()
    finally:
        await host.close(kill=True)
