"""The scheduler: slots, fairness, hold and resume."""

import asyncio

import pytest

from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.calls.waiting import WaitTimer, total_s
from leyden.server.gateway.errors import ErrorKind, GatewayError


async def visit(scheduler: Scheduler, rollout: str, order: list[str], leave: asyncio.Event) -> None:
    async with scheduler.slot(rollout, WaitTimer()):
        order.append(rollout)
        await leave.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_rollouts_are_served_round_robin() -> None:
    scheduler, order, leave = Scheduler(slots=1), [], asyncio.Event()
    leave.set()
    scheduler.hold()
    visits = [asyncio.create_task(visit(scheduler, name, order, leave)) for name in "aaab"]
    await settle()
    assert scheduler.waiting == 4
    scheduler.resume()
    await asyncio.gather(*visits)
    assert order == ["a", "b", "a", "a"]


async def test_no_more_are_let_in_than_there_is_room_for() -> None:
    scheduler, order, leave = Scheduler(slots=2), [], asyncio.Event()
    visits = [asyncio.create_task(visit(scheduler, str(n), order, leave)) for n in range(5)]
    await settle()
    assert order == ["0", "1"]
    leave.set()
    await asyncio.gather(*visits)
    assert len(order) == 5


async def test_a_call_that_stops_waiting_takes_no_slot() -> None:
    scheduler, order, leave = Scheduler(slots=1), [], asyncio.Event()
    visits = [asyncio.create_task(visit(scheduler, name, order, leave)) for name in "abc"]
    await settle()
    visits[1].cancel()
    await settle()
    leave.set()
    await asyncio.gather(*visits, return_exceptions=True)
    assert order == ["a", "c"]
    assert scheduler.waiting == 0
    async with asyncio.timeout(20), scheduler.slot("d", WaitTimer()):
        pass


async def test_a_full_queue_and_a_long_hold_are_errors_an_sdk_understands() -> None:
    scheduler = Scheduler(slots=1, max_waiting=1, max_wait_s=0.05)
    scheduler.hold()
    waiting = asyncio.create_task(visit(scheduler, "a", [], asyncio.Event()))
    await settle()
    with pytest.raises(GatewayError) as busy:
        await visit(scheduler, "b", [], asyncio.Event())
    assert busy.value.kind is ErrorKind.RATE_LIMITED
    assert busy.value.retry_after
    with pytest.raises(GatewayError) as held:
        await waiting
    assert held.value.kind is ErrorKind.FAILED


async def test_queue_pressure_is_how_many_wait_for_each_slot_and_unknown_while_weights_change() -> None:
    scheduler = Scheduler(slots=2)

    async def call(rollout: str) -> None:
        async with scheduler.slot(rollout, WaitTimer()):
            await asyncio.Event().wait()

    calls = [asyncio.create_task(call(f"r{n}")) for n in range(5)]
    await asyncio.sleep(0)
    assert scheduler.queue_pressure == 1.5
    scheduler.hold()
    assert scheduler.queue_pressure is None
    scheduler.resume()
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert scheduler.queue_pressure == 0


async def test_a_call_whose_slot_was_granted_just_before_a_hold_waits_with_the_others() -> None:
    scheduler, timer, leave = Scheduler(slots=1), WaitTimer(), asyncio.Event()

    async def call() -> None:
        async with scheduler.slot("b", timer):
            await leave.wait()

    async with scheduler.slot("a", WaitTimer()):
        calling = asyncio.create_task(call())
        await settle()
    scheduler.hold()
    await settle()
    before = total_s(timer.intervals())
    await asyncio.sleep(0.05)
    assert total_s(timer.intervals()) >= before + 0.05
    scheduler.resume()
    leave.set()
    await calling
