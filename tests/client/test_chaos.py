"""Everything at once: agents that hang, crash, fork and flood, under workers that are killed at random.

Each rollout still ends once, with the outcome that its own conduct earns; no process is left; the accounts add up.
"""

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from modelserving import eventually
from worksite import AGENTS, Worksite

from leyden.backoff import Backoff
from leyden.client.worker.process import WorkerProcess
from leyden.client.worker.worker import WorkerOptions
from leyden.outcomes import Ending
from leyden.records import Event, RunSettings, Task
from leyden.server.keys import KeyKind
from leyden.store import attempts
from leyden.wire import GroupSpec, RunSpec

MARK = "LEYDEN_CHAOS"
RUNS = {"callables": "chaos.py:act", "commands": f"{sys.executable} chaos.py"}
EARNS = {
    "ask": Ending.SUCCEEDED,
    "fork": Ending.SUCCEEDED,
    "print": Ending.SUCCEEDED,
    "raise": Ending.AGENT_ERROR,
    "exit": Ending.AGENT_ERROR,
    "fall": Ending.AGENT_ERROR,
    "die": Ending.AGENT_ERROR,
    "block": Ending.TIMEOUT,
    "burn": Ending.TIMEOUT,
}
RARE = {"exit": 1, "fall": 1, "die": 1, "block": 2, "burn": 1, "fork": 3, "print": 3, "raise": 3}
"""Of fifty rollouts; the others only ask."""


def deal(rollouts: int, dice: random.Random) -> list[tuple[str, str]]:
    """The rollouts as (run, what to do), in random order, every kind in either run."""
    kinds = [kind for kind, count in RARE.items() for _ in range(count)]
    kinds += ["ask"] * (50 - len(kinds))
    dealt = [(run, kind) for run in RUNS for kind in kinds * (rollouts // 100)]
    dice.shuffle(dealt)
    return dealt


@asynccontextmanager
async def killed_at_random(site: Worksite, dice: random.Random, every_s: float) -> AsyncIterator[list[WorkerProcess]]:
    """Four workers, two a run; now and then one is killed, and another takes its place."""

    def start(run: str) -> WorkerProcess:
        key = site.server.service.keyring.make(KeyKind.WORKER, 3600, run=run)[0]
        options = WorkerOptions(
            server=site.server.url,
            run=run,
            agent=RUNS[run],
            base=str(AGENTS),
            concurrency=8,
            time_limit_s=8.0,
            drain_s=3.0,
            name=f"w-{uuid4().hex[:8]}",
        )
        return WorkerProcess(options, key, log)

    async def kill() -> None:
        while True:
            await asyncio.sleep(dice.uniform(0.5, 1.5) * every_s)
            place = dice.randrange(len(workers))
            workers[place].process.kill()
            workers[place].process.wait()
            workers[place] = start(runs[place])

    log = Path(os.devnull)
    runs = [*RUNS, *RUNS]
    workers = [start(run) for run in runs]
    killing = asyncio.create_task(kill())
    try:
        yield workers
    finally:
        killing.cancel()
        for worker in workers:
            worker.stop()
        await asyncio.gather(*(asyncio.to_thread(worker.process.wait) for worker in workers))


def marked(mark: str) -> list[psutil.Process]:
    """The processes that descend from this test."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def log_of(site: Worksite, run: str) -> list[Event]:
    found: list[Event] = []
    while more := (await site.remote.events(run, found[-1].seq if found else 0)).events:
        found += more
    return found


@pytest.mark.parametrize("rollouts", [100, pytest.param(2000, marks=pytest.mark.slow, id="2000")])
async def test_every_rollout_ends_once_and_as_it_deserves(
    site: Worksite, rollouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("LEYDEN_SEED") or random.randrange(10**6))
    print(f"LEYDEN_SEED={seed}")
    dice, mark = random.Random(seed), uuid4().hex
    monkeypatch.setenv(MARK, mark)
    # the default would have the test wait for minutes for rollouts that are killed often
    monkeypatch.setattr(attempts, "RETRY_BACKOFF", Backoff(first_s=0.5, max_s=2.0))
    earned: dict[str, dict[str, Ending]] = {run: {} for run in RUNS}
    for run in RUNS:
        await site.remote.create_run(RunSpec(run, RunSettings(lease_s=3.0, max_attempts=50)))
    for n, (run, kind) in enumerate(deal(rollouts, dice)):
        await site.remote.enqueue(run, GroupSpec(f"{kind}-{n}", Task(f"t{n}", {"do": kind, "n": n})))
        earned[run][f"{kind}-{n}.0"] = EARNS[kind]
    async with killed_at_random(site, dice, every_s=5.0):
        for run in RUNS:
            after, left = 0, len(earned[run])
            while left:
                log = await site.remote.events(run, after, wait=120, kind="rollout.finished")
                after, left = log.after, left - len(log.events)
                assert log.events, await site.remote.summary(run)
    for run in RUNS:
        log = await log_of(site, run)
        finished = [event for event in log if event.kind == "rollout.finished"]
        wrong = [event.subject for event in finished if event.data["ending"] != earned[run][event.subject]]
        assert not wrong, [attempt.outcome for attempt in (await site.remote.rollout(run, wrong[0])).attempts]
        assert sorted(event.subject for event in finished) == sorted(earned[run])
        started = Counter(event.subject for event in log if event.kind == "attempt.started")
        ended = Counter(event.subject for event in log if event.kind == "attempt.ended")
        assert started == ended and set(started.values()) == {1}
        summary = await site.remote.summary(run)
        assert summary.rollouts == Counter(earned[run].values())
        assert summary.groups == summary.groups_finished == len(earned[run])
    await eventually(lambda: not marked(mark))
