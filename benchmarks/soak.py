"""An hour of model calls on one server: does its memory stay where it was after the first ten minutes?

Agents with scripted answers lease rollouts, hold conversations of ten turns in every dialect, streamed and not, send
spans, and finish. Half of them work in one run that lasts; the others in runs that are deleted one after another.
Texts are new in every rollout, but for the system prompt and what rollouts of a group share. A page of the dashboard
and the metrics are read all the time. The memory (RSS) of the server's process is sampled every ten seconds.

    python benchmarks/soak.py                        an hour at 120 calls a second
    python benchmarks/soak.py --minutes 20 --rate 60

The last line is one JSON object. `slope_mb_per_min` is fitted to all samples after the first ten minutes (a sixth of
the time if it is shorter than an hour), and `ratio` is the mean of their last quarter over that of their first. Memory
is `flat` if both are below their bounds: 0.25 MB a minute, and 1.05.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from reporting import add_out, report_result
from scripted_server import ANSWER

from leyden.api.client import Remote, read_key
from leyden.api.wire import FinishRequest, GroupSpec, KeySpec, Lease, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import Reward, RunSettings, Task, trace_id

HERE = Path(__file__).parent
AGENTS, TURNS, GROUP_SIZE = 16, 10, 8
DIALECTS = ("chat", "messages", "responses", "completions")
SAMPLE_S = 10.0
SHORT_RUN_S = 240.0
"""How long a run lasts before it is deleted."""
WARM_UP = 1 / 6
"""The share of the time that is not judged: ten minutes of an hour."""
SLOPE_MB_PER_MIN, RATIO = 0.25, 1.05
WORDS = Path(__file__).read_text(encoding="utf-8").split()
SYSTEM = "You are an agent with tools. Use them, think step by step, and say what you found. " * 6


class Pace:
    """Lets calls begin at a steady rate."""

    def __init__(self, per_second: float) -> None:
        self._every, self._next = 1 / per_second, time.monotonic()

    async def turn(self) -> None:
        """Wait until the next call may begin."""
        now = time.monotonic()
        self._next = max(self._next + self._every, now - 1.0)  # what a stall of the machine held up is not made up for
        await asyncio.sleep(self._next - now)


class Soak:
    """The load: agents, runs and pages, until a deadline."""

    def __init__(
        self, remote: Remote, session: aiohttp.ClientSession, viewer: str, rate: float, seconds: float
    ) -> None:
        self._remote, self._session, self._viewer = remote, session, viewer
        self._pace, self._deadline = Pace(rate), time.monotonic() + seconds
        self._runs = {"lasting": "lasting", "short": "short-0"}
        self._groups = itertools.count()
        self.rollouts, self.deleted = 0, 0
        self.statuses: Counter[int] = Counter()

    async def run(self) -> None:
        """Work until the deadline."""
        for run in self._runs.values():
            await self._remote.create_run(RunSpec(run, RunSettings(lease_s=600)))
        agents = [self._agent(number, list(self._runs)[number % 2]) for number in range(AGENTS)]
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._replace_runs()), tasks.create_task(self._view())]
            await asyncio.gather(*agents)
            for task in others:
                task.cancel()

    async def _agent(self, number: int, kind: str) -> None:
        """Work through one group after another, and through one rollout at least."""
        chance, dialect = random.Random(number), DIALECTS[number % len(DIALECTS)]
        while True:
            run, group = self._runs[kind], next(self._groups)
            task, question = Task(f"t{group}", None), f"Task {group}: {text(random.Random(group), 60)}"
            await self._remote.enqueue(run, GroupSpec(f"{run}-g{group}", task, GROUP_SIZE, step=group // 32))
            for lease in await self._remote.lease(LeaseRequest(f"w{number}", GROUP_SIZE, run=run)):
                await self._rollout(lease, dialect, question, chance)
                if time.monotonic() > self._deadline:
                    return

    async def _rollout(self, lease: Lease, dialect: str, question: str, chance: random.Random) -> None:
        headers = {"authorization": f"Bearer {lease.key}"}
        said = [question]
        for turn in range(TURNS):
            await self._pace.turn()
            path, body = request(dialect, said)
            stream = turn % 3 == 2
            async with self._session.post(
                f"{lease.url}{path}", json={**body, "stream": stream}, headers=headers
            ) as reply:
                answer = await reply.read()
                self.statuses[reply.status] += 1
                assert reply.status == 200, (reply.status, answer[:500])
            said += [ANSWER, f"Result {turn}: {text(chance, chance.randrange(5, 120))}"]
        await self._send_spans(lease, headers)
        ending, rewards = Outcome(Ending.SUCCEEDED), (Reward("final", chance.random()),)
        await self._remote.finish(lease.attempt.run, lease.attempt.id, FinishRequest(ending, said[-1], rewards))
        self.rollouts += 1

    async def _send_spans(self, lease: Lease, headers: dict[str, str]) -> None:
        times = {"startTimeUnixNano": str(time.time_ns()), "endTimeUnixNano": str(time.time_ns())}
        spans = [
            {"traceId": trace_id(lease.attempt.id), "spanId": f"{number + 1:016x}", "name": "look", "kind": 1, **times}
            for number in range(TURNS)
        ]
        body = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "soak"}, "spans": spans}]}]}
        async with self._session.post(f"{lease.url}/v1/traces", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()

    async def _replace_runs(self) -> None:
        """Begin a new run from time to time, and delete the one before the last."""
        for number in itertools.count(1):
            await asyncio.sleep(SHORT_RUN_S)
            run = f"short-{number}"
            await self._remote.create_run(RunSpec(run, RunSettings(lease_s=600)))
            self._runs["short"] = run
            if number > 1:
                await self._remote.delete_run(f"short-{number - 2}")
                self.deleted += 1

    async def _view(self) -> None:
        """Read what a page of the dashboard and a monitoring system read."""
        headers = {"authorization": f"Bearer {self._viewer}"}
        while True:
            await asyncio.sleep(2.0)
            await self._remote.overview()
            run = f"/api/runs/{self._runs['short']}"
            for path in (f"{run}/search", f"{run}/rewards", f"{run}/failures", "/api/fleet", "/metrics"):
                async with self._session.get(f"{self._remote.url}{path}", headers=headers) as reply:
                    await reply.read()


def text(chance: random.Random, words: int) -> str:
    """Return so many random words."""
    return " ".join(chance.choices(WORDS, k=words))


def request(dialect: str, said: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return path and body of the next call of a conversation, which alternates between agent and model."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(said)]
    match dialect:
        case "chat":
            return "/v1/chat/completions", {
                "model": "model",
                "messages": [{"role": "system", "content": SYSTEM}, *messages],
            }
        case "messages":
            return "/v1/messages", {"model": "model", "system": SYSTEM, "messages": messages, "max_tokens": 500}
        case "responses":
            return "/v1/responses", {"model": "model", "instructions": SYSTEM, "input": messages}
    return "/v1/completions", {"model": "model", "prompt": SYSTEM + "\n".join(said), "max_tokens": 500}


@contextmanager
def running_server(home: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """Run a server with a scripted model: its process, its URL and its admin key."""
    with (home / "server.log").open("wb") as log:
        command = [sys.executable, str(HERE / "scripted_server.py"), str(home)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        yield psutil.Process(process.pid), started["url"], read_key(Path(started["admin_key_file"]))
    finally:
        process.terminate()
        process.wait(120)


@asynccontextmanager
async def sampling(process: psutil.Process, samples: list[float], every_s: float) -> AsyncIterator[None]:
    """Sample the memory of a process in MB."""

    async def sample() -> None:
        started = time.monotonic()
        for number in itertools.count(1):
            await asyncio.sleep(started + number * every_s - time.monotonic())
            samples.append(process.memory_info().rss / 2**20)
            if number * every_s % 60 == 0:
                print(f"minute {number * every_s / 60:3.0f}: {samples[-1]:.1f} MB", file=sys.stderr, flush=True)

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()


def judge(samples: Sequence[float], every_s: float) -> dict[str, Any]:
    """Return slope and ratio of the samples after the warm-up, and whether they are below their bounds."""
    judged = samples[round(len(samples) * WARM_UP) :]
    minutes = [number * every_s / 60 for number in range(len(judged))]
    slope = statistics.linear_regression(minutes, judged).slope
    quarter = max(1, len(judged) // 4)
    ratio = statistics.fmean(judged[-quarter:]) / statistics.fmean(judged[:quarter])
    return {
        "ratio": round(ratio, 4),
        "memory_mb": {
            "first": round(samples[0], 1),
            "after_warm_up": round(judged[0], 1),
            "last": round(judged[-1], 1),
            "largest": round(max(samples), 1),
        },
        "slope_mb_per_min": round(slope, 3),
        "flat": slope < SLOPE_MB_PER_MIN and ratio < RATIO,
    }


async def soak(home: Path, minutes: float, rate: float, sample_s: float = SAMPLE_S) -> dict[str, Any]:
    """Call a server for so many minutes; returns what was done and how its memory changed."""
    samples: list[float] = []
    with running_server(home) as (process, url, admin):
        connector = aiohttp.TCPConnector(limit=0)
        async with Remote(url, admin) as remote, aiohttp.ClientSession(connector=connector) as session:
            viewer = (await remote.create_key(KeySpec("viewer"))).key
            load = Soak(remote, session, viewer, rate, minutes * 60)
            began = time.monotonic()
            async with sampling(process, samples, sample_s):
                await load.run()
            took = time.monotonic() - began
    calls, minute = sum(load.statuses.values()), round(60 / sample_s)
    return {
        **judge(samples, sample_s),
        "minutes": round(took / 60, 1),
        "calls": calls,
        "calls_per_s": round(calls / took, 1),
        "rollouts": load.rollouts,
        "runs_deleted": load.deleted,
        "memory_mb_by_minute": [round(value, 1) for value in samples[minute - 1 :: minute]],
    }


def main() -> None:
    """Run what the arguments ask for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=120.0, help="calls a second")
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report_result(asyncio.run(soak(Path(folder), options.minutes, options.rate)), options.out)


if __name__ == "__main__":
    main()
