"""A worker runs as many rollouts at the same time as the engine can serve, and no more."""

import asyncio
import statistics

import pytest
from msgspec.structs import replace
from worker_harness import WorkerHarness

from leyden.client.worker.lease_loop import ConcurrencyLimit
from leyden.server.gateway.calls.scheduler import Scheduler


async def test_the_limit_falls_while_calls_wait_and_rises_again() -> None:
    slots = ConcurrencyLimit(10)
    assert await slots.acquire_all() == 10
    for _ in range(9):
        slots.adjust(3.0)
    assert slots.limit == 10  # not before as many attempts have finished
    slots.adjust(3.0)
    assert slots.limit == 8
    for _ in range(100):
        slots.adjust(3.0)
    assert slots.limit == 1  # never zero
    slots.release(9)
    waiting = asyncio.create_task(slots.acquire_all())
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.adjust(0.7)
    slots.adjust(None)
    assert slots.limit == 1
    for _ in range(3):
        slots.adjust(0.2)
    assert slots.limit == 4 and await waiting == 3
    for _ in range(100):
        slots.adjust(0.0)
    assert slots.limit == 10


async def test_a_slow_engine_has_fewer_rollouts_at_the_same_time_and_is_no_slower(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = harness.server.service.gateway
    assert gateway is not None
    gateway.models = {"spark": replace(gateway.models["spark"], scheduler=Scheduler(slots=4))}
    harness.server.engine.delay_s = 0.25

    async def finish(group: str) -> float:
        """How many rollouts were at work on average in the second half of the time."""
        await harness.queue(group, {"n": 7}, size=100)
        alive = []
        finished = asyncio.create_task(harness.episodes(group, timeout_s=180))
        while not finished.done():
            alive.append(len(harness.server.service.leases))
            await asyncio.sleep(0.05)
        assert all(episode.final_reward(0.0) == 1.0 for episode in await finished)
        return statistics.mean(alive[len(alive) // 2 : -len(alive) // 6])

    await harness.open()
    with harness.worker("plain.py:act", concurrency=24):
        await harness.queue("first", {"n": 7})
        await harness.episode("first")
        with monkeypatch.context() as unknown:
            unknown.setattr(Scheduler, "queue_pressure", None)
            at_work_all = await finish("all")
        at_work = await finish("fewer")
    assert 4 <= at_work < at_work_all / 1.5  # with one for each slot at least, the engine is as fast as with all
