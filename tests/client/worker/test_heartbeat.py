"""Heartbeats keep leases alive, and their loop can always be cancelled."""

import asyncio

import pytest

from leyden.api.wire import EndedAttempt, HeartbeatReply, HeartbeatRequest, Lease
from leyden.client.attempt.active_attempt import ActiveAttempt
from leyden.client.worker.heartbeat import Heartbeat
from leyden.records import Attempt, Purpose, Task


def leased(number: int, lease_s: float) -> ActiveAttempt:
    attempt = Attempt(f"g.0.{number}", "r", "g.0", number, "w", None, 0.0, lease_s)
    return ActiveAttempt(Lease(attempt, Task("t", {}), Purpose.TRAIN, lease_s, "key", "http://server", "00-1-1-01"))


class Client:
    """A server that has ended one attempt."""

    def __init__(self, ended: str) -> None:
        self.ended = ended
        self.renewed: list[list[str]] = []

    def limited(self, *_: float, **__: float) -> "Client":
        return self

    async def heartbeat(self, worker: str, running: HeartbeatRequest) -> HeartbeatReply:
        self.renewed.append(list(running.attempts))
        return HeartbeatReply({}, (EndedAttempt(self.ended, None),))


async def test_the_shortest_lease_sets_the_pace_and_an_attempt_that_the_server_ended_is_resolved() -> None:
    client = Client(ended="g.0.2")
    heartbeat = Heartbeat(client, "w")
    running = asyncio.create_task(heartbeat.run())
    slow, quick = leased(1, lease_s=600.0), leased(2, lease_s=0.03)
    heartbeat.track(slow)
    await asyncio.sleep(0)
    heartbeat.track(quick)
    assert await asyncio.wait_for(quick.end, 60) is None
    assert client.renewed[0] == ["g.0.1", "g.0.2"] and not slow.end.done()
    for active in heartbeat.tracked():
        heartbeat.untrack(active)
    assert await heartbeat.wait_idle(0.0)
    running.cancel()
    await asyncio.wait((running,))


async def test_attempts_with_a_shorter_lease_that_come_and_go_do_not_delay_the_next_heartbeat() -> None:
    client = Client(ended="")
    heartbeat = Heartbeat(client, "w")
    running = asyncio.create_task(heartbeat.run())
    heartbeat.track(leased(1, lease_s=0.3))
    short = leased(2, lease_s=0.2)
    async with asyncio.timeout(20):
        while not client.renewed:
            heartbeat.track(short)
            await asyncio.sleep(0.001)
            heartbeat.untrack(short)
    assert "g.0.1" in client.renewed[0]
    running.cancel()
    await asyncio.wait((running,))


async def test_a_cancellation_that_comes_together_with_a_new_attempt_is_not_lost() -> None:
    heartbeat = Heartbeat(Client(ended=""), "w")
    heartbeat.track(leased(1, lease_s=600.0))
    running = asyncio.create_task(heartbeat.run())
    await asyncio.sleep(0.01)  # it waits for the next heartbeat
    heartbeat.track(leased(2, lease_s=60.0))  # wakes it up
    await asyncio.sleep(0)  # with wait_for, the inner wait is done now, and a cancellation would be swallowed
    running.cancel()
    done, _ = await asyncio.wait((running,), timeout=20)
    assert done and running.cancelled()


async def test_the_first_to_resolve_an_attempt_decides_how_it_ended() -> None:
    active = leased(1, lease_s=60.0)
    active.resolve(None)
    active.resolve(pytest.fail)
    assert await active.end is None
