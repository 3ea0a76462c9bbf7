"""Chaos test: agents hang, crash, fork and flood their output while workers are killed at random.

Each rollout still ends once, with the outcome of its own behaviour; no process is left; the counts add up. On a busy
machine a few that should succeed or fail take longer than the time limit instead; the limit must then have passed.
"""

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

import psutil
import pytest
from modelserving import eventually
from randomness import new_seed
from worker_harness import AGENTS, WorkerHarness

from leyden.api.wire import EventCursor, GroupSpec, RunSpec
from leyden.backoff import Backoff
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.process import WorkerProcess
from leyden.config.schema import RolloutConfig, WorkerConfig
from leyden.outcomes import Ending
from leyden.records import Event, RunSettings, Task
from leyden.server.control.keys import KeyKind
from leyden.store.write import attempts

MARK = "LEYDEN_CHAOS"
RUNS = {"callables": "chaos.py:act", "commands": f"{sys.executable} chaos.py"}
EXPECTED = {
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
RARE = {"exit": 1, "fall": 1, "die": 1, "block": 1, "burn": 1, "fork": 2, "print": 2, "raise": 2}
"""How many of fifty rollouts do this, or of all if there are fewer; the others only call the model."""
TIME_LIMIT_S, KILL_EVERY_S = 5.0, 4.0
"""On a machine that is not slow."""


def slowness() -> float:
    """How many times half a second a command takes to start, between 1 and 6: how much longer rollouts may take."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import urllib3"], check=True)
    return min(max(1.0, 2 * (time.monotonic() - started)), 6.0)


def shuffled_tasks(rollouts: int, rng: random.Random) -> list[tuple[str, str]]:
    """Pairs of run and behaviour in random order; both runs have every behaviour."""
    kinds = [kind for kind, count in RARE.items() for _ in range(count)]
    kinds += ["ask"] * (min(50, rollouts // 2) - len(kinds))
    tasks = [(run, kind) for run in RUNS for kind in kinds * max(1, rollouts // 100)]
    rng.shuffle(tasks)
    return tasks


@asynccontextmanager
async def killed_at_random(
    harness: WorkerHarness, rng: random.Random, slower: float
) -> AsyncIterator[list[WorkerProcess]]:
    """Run two workers for each run; now and then kill one and start another. `slower` stretches all times."""

    def start(run: str) -> WorkerProcess:
        key = harness.server.service.keyring.create(KeyKind.WORKER, 3600, run=run)[0]
        options = WorkerOptions(
            server=harness.server.url,
            run=run,
            agent=RUNS[run],
            base=str(AGENTS),
            concurrency=8,
            rollout=RolloutConfig(time_limit_s=slower * TIME_LIMIT_S),
            workers=WorkerConfig(drain_s=3.0),
            name=f"w-{uuid4().hex[:8]}",
        )
        return WorkerProcess(options, key)

    async def kill() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * slower * KILL_EVERY_S)
            index = rng.randrange(len(workers))
            workers[index].process.kill()
            workers[index].process.wait()
            workers[index] = start(runs[index])

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


async def log_of(harness: WorkerHarness, run: str) -> list[Event]:
    found: list[Event] = []
    while more := (await harness.remote.follow_events(run, EventCursor(found[-1].seq if found else 0))).events:
        found += more
    return found


@pytest.mark.parametrize("rollouts", [36, pytest.param(2000, marks=pytest.mark.slow, id="2000")])
async def test_every_rollout_ends_once_with_the_outcome_of_its_own_behaviour(
    harness: WorkerHarness, rollouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = new_seed()
    print(f"LEYDEN_SEED={seed}")
    rng, mark = random.Random(seed), uuid4().hex
    monkeypatch.setenv(MARK, mark)
    # the default would have the test wait for minutes for rollouts that are killed often
    monkeypatch.setattr(attempts, "RETRY_BACKOFF", Backoff(first_s=0.5, max_s=2.0))
    expected: dict[str, dict[str, Ending]] = {run: {} for run in RUNS}
    for run in RUNS:
        await harness.remote.create_run(RunSpec(run, RunSettings(lease_s=3.0, max_attempts=50)))
    for n, (run, kind) in enumerate(shuffled_tasks(rollouts, rng)):
        await harness.remote.enqueue(run, GroupSpec(f"{kind}-{n}", Task(f"t{n}", {"do": kind, "n": n})))
        expected[run][f"{kind}-{n}.0"] = EXPECTED[kind]
    slower = await asyncio.to_thread(slowness)
    async with killed_at_random(harness, rng, slower):
        for run in RUNS:
            after, left = 0, len(expected[run])
            while left:
                log = await harness.remote.follow_events(run, EventCursor(after, wait=120, kind="rollout.finished"))
                after, left = log.after, left - len(log.events)
                assert log.events, await harness.remote.summarise_run(run)
    for run in RUNS:
        log = await log_of(harness, run)
        finished = [event for event in log if event.kind == "rollout.finished"]
        endings = {event.subject: event.data["ending"] for event in finished}
        assert len(finished) == len(endings) and endings.keys() == expected[run].keys()
        wrong = [rollout for rollout, ending in endings.items() if ending != expected[run][rollout]]
        for rollout in wrong:
            attempt = (await harness.remote.get_rollout(run, rollout)).attempts[-1]
            assert attempt.outcome and attempt.outcome.ending == Ending.TIMEOUT, attempt.outcome
            assert attempt.ended and attempt.ended - attempt.started >= slower * TIME_LIMIT_S
        assert len(wrong) <= len(endings) / 5
        started = Counter(event.subject for event in log if event.kind == "attempt.started")
        ended = Counter(event.subject for event in log if event.kind == "attempt.ended")
        assert started == ended and set(started.values()) == {1}
        summary = await harness.remote.summarise_run(run)
        assert summary.rollouts == Counter(endings.values())
        assert summary.groups == summary.groups_finished == len(expected[run])
    await eventually(lambda: not marked(mark))
