"""SIGKILL at random moments under load: everything that was acknowledged is there, and nothing is counted twice."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import pytest
from serving import ServerProcess

from leyden.api.client import Remote, RemoteError
from leyden.api.wire import EventCursor, FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Reward, RewardKind, RunSettings, State, Task

HUNG_UP = (aiohttp.ClientError, ConnectionError, TimeoutError)
CLIENTS, GROUP, BACKLOG = 8, 2, 64
STUCK_S = 300.0
"""How long nothing may be finished at the end, however busy the machine is."""


class Load:
    """Clients that work without pause, and write down only what the server has acknowledged.

    Groups are queued only as fast as rollouts are leased, so that little is left to do after the last kill.
    """

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.up = asyncio.Event()
        self.numbers = itertools.count()
        self.groups: set[str] = set()
        self.leased: set[str] = set()
        self.progress = asyncio.Event()
        self.calls: dict[str, set[str]] = {}
        self.rewards: dict[str, set[str]] = {}
        self.counted: Counter[str] = Counter()
        self.unanswered = 0
        self.stopping = False

    async def queue_groups(self) -> None:
        while not self.stopping:
            await self.up.wait()
            if len(self.groups) * GROUP - len(self.leased) >= BACKLOG:
                self.progress.clear()
                await self.progress.wait()
                continue
            name = f"g{next(self.numbers)}"
            try:
                await self.remote.enqueue("r", GroupSpec(name, Task("t", {"q": "?"}), GROUP))
                self.groups.add(name)
            except HUNG_UP:
                self.unanswered += 1

    async def work(self, worker: str) -> None:
        while True:
            await self.up.wait()
            try:
                leases = await self.remote.lease(LeaseRequest(worker, wait=0.2))
                if not leases and self.stopping and await self.idle():
                    return
                for lease in leases:
                    self.leased.add(lease.attempt.rollout)
                    self.progress.set()
                    await self.attempt(lease.attempt.id)
            except HUNG_UP:
                self.unanswered += 1
            except RemoteError as refused:
                assert refused.reason == "conflict", refused  # its lease ran out meanwhile

    async def attempt(self, id: str) -> None:
        for turn in range(3):
            await self.remote.record_calls("r", id, [Call(f"c{turn}", prompt_ids=(1, 2), completion_ids=(3,))])
            self.calls.setdefault(id, set()).add(f"c{turn}")
        await self.remote.record_rewards("r", id, [Reward("step", 0.5, RewardKind.STEP)])
        self.rewards.setdefault(id, set()).add("step")
        report = FinishRequest(Outcome(Ending.SUCCEEDED), result=id, rewards=(Reward("final", 1.0),))
        if (await self.remote.finish("r", id, report)).counted:
            self.counted[id] += 1

    async def stop(self, clients: Iterable["asyncio.Task[None]"]) -> None:
        """Queue no more groups and wait until all rollouts are finished; fails when nothing is finished any more."""
        self.stopping = True
        self.progress.set()
        running = set(clients)
        while running:
            before = len(self.counted)
            ended, running = await asyncio.wait(running, timeout=STUCK_S, return_when=asyncio.FIRST_COMPLETED)
            for client in ended:
                client.result()
            assert ended or len(self.counted) > before, f"nothing was finished in {STUCK_S:g} s"

    async def idle(self) -> bool:
        rollouts = (await self.remote.summarise_run("r")).rollouts
        return not set(rollouts) & {State.QUEUED, State.RUNNING}


async def kill_under_load(home: Path, kills: int, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    with ServerProcess(home) as server:
        async with Remote(server.url, server.admin_key) as remote:
            await remote.create_run(RunSpec("r", RunSettings(lease_s=1.0, max_attempts=100)))
            load = Load(remote)
            load.up.set()
            queueing = asyncio.create_task(load.queue_groups())
            working = [asyncio.create_task(load.work(f"w{n}")) for n in range(CLIENTS)]
            for _ in range(kills):
                await asyncio.sleep(chance.uniform(0.05, 0.6))
                server.kill()
                load.up.clear()
                await asyncio.to_thread(server.start)
                load.up.set()
            await load.stop((queueing, *working))
            assert load.unanswered >= kills  # the kills did hit somebody
            await check(remote, load)
        assert server.stop() == 0


async def check(remote: Remote, load: Load) -> None:
    assert len(load.counted) > 10
    assert max(load.counted.values()) == 1
    finished_by_rollout: Counter[str] = Counter()
    for group in load.groups:
        for episode in await remote.group_episodes("r", group):
            assert episode.rollout.state is State.FINISHED
            assert episode.rollout.outcome == Outcome(Ending.SUCCEEDED)
            assert episode.attempt.result == episode.attempt.id
            finished_by_rollout[episode.rollout.id] += 1
    assert set(finished_by_rollout.values()) == {1}
    assert len(finished_by_rollout) == GROUP * len(load.groups)
    for id, calls in load.calls.items():
        episode = await remote.get_episode("r", id)
        assert calls <= {call.id for call in episode.calls}
        assert load.rewards.get(id, set()) <= {reward.id for reward in episode.rewards}
        if id in load.counted:
            assert episode.attempt.outcome == Outcome(Ending.SUCCEEDED)
    succeeded: Counter[str] = Counter()
    cursor = 0
    while events := (log := await remote.follow_events("r", EventCursor(cursor, kind="attempt.ended"))).events:
        cursor = log.after
        succeeded.update(e.data["rollout"] for e in events if e.data["ending"] == Ending.SUCCEEDED)
    assert max(succeeded.values()) == 1


async def test_nothing_acknowledged_is_lost_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    await kill_under_load(tmp_path, kills=6, seed=1)


@pytest.mark.slow
async def test_nothing_is_lost_in_two_hundred_kills(tmp_path: Path) -> None:
    await kill_under_load(tmp_path, kills=200, seed=random.randrange(2**32))
