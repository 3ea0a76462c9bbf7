"""A worker is at no more rollouts than the engine can make use of, and at no fewer."""

import asyncio
import statistics
import time

import pytest
from msgspec.structs import replace
from worksite import Worksite

from leyden.client.worker.concurrency import ConcurrencyLimit
from leyden.server.gateway.scheduler import Scheduler


async def test_places_close_while_calls_wait_and_open_again() -> None:
    places = ConcurrencyLimit(10)
    assert await places.take() == 10
    for _ in range(9):
        places.feel(3.0)
    assert places.open == 10  # not before a whole round
    places.feel(3.0)
    assert places.open == 8
    for _ in range(100):
        places.feel(3.0)
    assert places.open == 1  # never none
    places.release(9)
    waiting = asyncio.create_task(places.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    places.feel(0.7)
    places.feel(None)
    assert places.open == 1
    for _ in range(3):
        places.feel(0.2)
    assert places.open == 4 and await waiting == 3
    for _ in range(100):
        places.feel(0.0)
    assert places.open == 10


async def test_a_slow_engine_has_fewer_rollouts_at_once_and_is_no_slower_for_it(
    site: Worksite, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = site.server.service.gateway
    assert gateway is not None
    gateway.policies = {"spark": replace(gateway.policies["spark"], admission=Scheduler(at_once=4))}
    site.server.engine.delay_s = 0.1

    async def finish(group: str) -> tuple[float, float]:
        """The seconds it took, and how many rollouts were at work on average in the second half of them."""
        await site.queue(group, {"n": 7}, size=200)
        began, alive = time.monotonic(), []
        finished = asyncio.create_task(site.episodes(group, within_s=60))
        while not finished.done():
            alive.append(len(site.server.service.leases))
            await asyncio.sleep(0.05)
        assert all(episode.final_reward(0.0) == 1.0 for episode in await finished)
        return time.monotonic() - began, statistics.mean(alive[len(alive) // 2 : -len(alive) // 6])

    await site.open()
    with site.worker("plain.py:act", concurrency=48):
        await site.queue("first", {"n": 7})
        await site.episode("first")
        with monkeypatch.context() as unknown:
            unknown.setattr(Scheduler, "crowding", None)
            took_all, at_work_all = await finish("all")
        took, at_work = await finish("fewer")
    assert at_work_all > 30 and 4 <= at_work < 20
    assert took < 2 * took_all  # one rollout at a time would take four times as long
