"""Stalls of the server are not the fault of its workers: no lease expires because of one, and its cause is logged."""

import asyncio
import gzip
import logging
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.msgpack import encode
from prometheus_client import CollectorRegistry
from serving import ServerProcess

from leyden.api.client import Remote
from leyden.api.wire import GroupSpec, HeartbeatRequest, LeaseRequest, RunSpec
from leyden.records import RunSettings, Task
from leyden.server import loop_watchdog
from leyden.server.loop_watchdog import LoopWatchdog


async def test_a_server_that_was_stopped_gives_every_lease_its_full_time(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        async with Remote(server.url, server.admin_key) as remote:
            await remote.create_run(RunSpec("r", RunSettings(lease_s=1.5)))
            await remote.enqueue("r", GroupSpec("g", Task("t", {}), 3))
            leases = await remote.lease(LeaseRequest("w", 3))
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(4)  # longer than a lease and a stall that is let pass
            server.process.send_signal(signal.SIGCONT)
            reply = await remote.heartbeat("w", HeartbeatRequest(tuple([lease.attempt.id for lease in leases])))
            assert not reply.ended
            assert set(reply.expires) == {lease.attempt.id for lease in leases}


async def test_a_small_body_that_expands_to_millions_of_objects_is_refused_and_blocks_nobody(tmp_path: Path) -> None:
    objects = gzip.compress(b'{"resourceSpans": [' + b"{}," * (5 << 20) + b"{}]}", 1)
    attacks = [
        ("/v1/traces", "application/x-protobuf", gzip.compress(b"\x0a\x00" * (8 << 20), 1)),
        ("/v1/traces", "application/x-protobuf", gzip.compress(b"\x0a\x04\x12\x02\x12\x00" * (2 << 20), 1)),
        ("/v1/traces", "application/json", objects),
        ("/v1/chat/completions", "", objects),
        ("/v1/messages", "text/plain", objects),
        ("/v1/chat/completions", "application/msgpack", objects),
    ]
    with ServerProcess(tmp_path) as server:
        async with Remote(server.url, server.admin_key) as remote, aiohttp.ClientSession() as session:
            await remote.create_run(RunSpec("r", RunSettings(lease_s=2, agent_rewards=True)))
            await remote.enqueue("r", GroupSpec("g", Task("t", {})))
            (lease,) = await remote.lease(LeaseRequest("w"))
            rewards = f"/api/runs/r/attempts/{lease.attempt.id}/rewards"
            attacks.append((rewards, "application/msgpack", gzip.compress(encode([[]] * 300_000))))
            authorized = {"authorization": f"Bearer {lease.key}", "content-encoding": "gzip"}
            sending = [
                session.post(server.url + path, data=data, headers={**authorized, "content-type": content_type})
                for path, content_type, data in attacks
            ]
            refused = asyncio.gather(*sending)
            while not refused.done():
                assert not (await remote.heartbeat("w", HeartbeatRequest((lease.attempt.id,)))).ended
                await asyncio.sleep(0.05)
            for reply in await refused:
                assert reply.status in (400, 413) and "more than 250000" in await reply.text()  # values, or bytes
            await remote.enqueue("r", GroupSpec("large", Task("l", {"lists": [[]] * 300_000})))  # with a trusted key


async def test_what_blocks_the_event_loop_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watchdog, "_IDLE_SHARE", 0.0)  # however busy the machine is
    registry = CollectorRegistry()

    def compute_for_long() -> None:
        started = time.process_time()
        while time.process_time() - started < 1:
            pass

    with caplog.at_level(logging.WARNING, "leyden.server"):
        async with LoopWatchdog(registry):
            await asyncio.sleep(0.2)
            compute_for_long()
            await asyncio.sleep(0.2)
    (record,) = [r for r in caplog.records if "compute_for_long" in r.message]  # a busy machine may block it, too
    assert "blocked" in record.message and "test_stalls.py" in record.message
    blocked: Any = registry.get_sample_value("leyden_loop_blocked_seconds_total")
    assert blocked >= 0.8
    assert registry.get_sample_value("leyden_loop_lag_seconds_count")


async def test_a_server_that_was_stopped_is_not_said_to_be_blocked_by_its_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stand_still() -> None:
        time.sleep(1)  # as a process that was stopped, it uses no CPU

    with caplog.at_level(logging.WARNING, "leyden.server"):
        async with LoopWatchdog(CollectorRegistry()):
            await asyncio.sleep(0.2)
            stand_still()
            await asyncio.sleep(0.2)
    assert caplog.records and all("the server did not run for" in record.message for record in caplog.records)
