"""One server with 1,000, 3,000 and 10,000 open rollouts and up to 1,000 workers: throughput, memory and latency.

Server, protocol and store are the real ones; four scripted engines behind the router of replicas answer in a tenth of a
second. Each worker has its own connection, leases ten rollouts, renews their leases every ten seconds, and leases the
next when one is finished. Each rollout has its own connection, makes four calls with pauses between them, and is
finished; every tenth that is finished makes the trainer queue another group of ten.

    python benchmarks/scale.py
    python benchmarks/scale.py --rollouts 100 300 --seconds 3 --think 2

Server and load share the machine, so the figure that carries over to others is the server's CPU time for a call, with
its share of heartbeats, leases and reports. The last line is one JSON object: `ratio` is the number of calls for a
second of the server's CPU with the most rollouts, over that with the fewest. `lines` are least-squares fits: the value
at no rollouts, and what each thousand adds.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import psutil
from open_rollouts import HEARTBEAT_S, HERE, LEASE_S, Background, Connection, Latencies, Memory
from reporting import add_out, report_result

from leyden.api.client import Remote, read_key
from leyden.api.wire import FinishRequest, GroupSpec, HeartbeatRequest, KeySpec, Lease, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.process.resources import raise_file_limit
from leyden.records import RunSettings, Task

RUN = "scale"
OF_A_WORKER = GROUP = 10
CALLS = 4
OPENING = 32
"""Workers that lease for the first time at once."""


class Simulation:
    """A trainer and what workers and agents have in common."""

    def __init__(self, trainer: Remote, think_s: float, seed: int) -> None:
        self.trainer, self.think_s, self.rng = trainer, think_s, random.Random(seed)
        self.phase = "opening"
        self.calls, self.heartbeats = Latencies(), Latencies()
        self.open = self.groups = self.finished = self.lost = 0
        self.opening = asyncio.Semaphore(OPENING)

    async def queue(self, groups: int) -> None:
        """Queue groups of rollouts."""
        for _ in range(groups):
            self.groups += 1
            await self.trainer.enqueue(RUN, GroupSpec(f"g{self.groups}", Task("t", {}), size=GROUP))

    async def finish(self, remote: Remote, lease: Lease) -> None:
        """Finish a rollout; every tenth is replaced by a group of ten."""
        reply = await remote.finish(RUN, lease.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), result=1))
        self.lost += not reply.counted
        self.finished += 1
        if self.finished % GROUP == 0:
            await self.queue(1)

    async def call(self, connection: Connection) -> None:
        """Call the model once, and measure how long that takes."""
        phase, started = self.phase, time.perf_counter()
        self.lost += await connection.call() != 200
        self.calls.add(phase, time.perf_counter() - started)


class SimulatedWorker:
    """A worker that speaks the real protocol and whose agents only call the model."""

    def __init__(self, name: str, remote: Remote, simulation: Simulation) -> None:
        self._name, self._remote, self._simulation = name, remote, simulation
        self._leases: dict[str, Lease] = {}

    async def work(self) -> None:
        """Keep ten rollouts open."""
        async with self._remote, Background() as start:
            async with self._simulation.opening:
                leases = await self._lease(OF_A_WORKER)
            for lease in leases:
                start(self._run_rollouts, lease)
            start(self._renew)
            await asyncio.Event().wait()

    async def _lease(self, count: int) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < count:
            leases += await self._remote.lease(LeaseRequest(self._name, count - len(leases), run=RUN, wait=5.0))
        self._leases |= {lease.attempt.id: lease for lease in leases}
        self._simulation.open += count
        return leases

    async def _run_rollouts(self, lease: Lease) -> None:
        simulation, first = self._simulation, True
        while True:
            connection = Connection(lease.url, lease.key)
            try:
                for _ in range(simulation.rng.randint(1, CALLS) if first else CALLS):  # so that they end at any time
                    await asyncio.sleep(simulation.rng.uniform(0 if first else 0.8, 1.2) * simulation.think_s)
                    await simulation.call(connection)
                    first = False
            finally:
                connection.close()
            del self._leases[lease.attempt.id]
            simulation.open -= 1
            await simulation.finish(self._remote, lease)
            (lease,) = await self._lease(1)

    async def _renew(self) -> None:
        simulation = self._simulation
        await asyncio.sleep(simulation.rng.uniform(0, HEARTBEAT_S))
        while True:
            phase, started = simulation.phase, time.perf_counter()
            reply = await self._remote.heartbeat(self._name, HeartbeatRequest(tuple(self._leases)))
            simulation.heartbeats.add(phase, time.perf_counter() - started)
            simulation.lost += sum(ended.attempt in self._leases for ended in reply.ended)
            await asyncio.sleep(HEARTBEAT_S)


async def measure(home: Path, rollouts: int, seconds: float, think_s: float, seed: int = 1) -> dict[str, Any]:
    """Simulate so many open rollouts against a server in its own process."""
    with (home / "server.log").open("wb") as log:
        command = [sys.executable, str(HERE / "scripted_server.py"), str(home), "replicas"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)  # noqa: ASYNC220 - it returns at once
    try:
        assert server.stdout is not None
        started = json.loads(server.stdout.readline())
        async with Remote(started["url"], read_key(Path(started["admin_key_file"]))) as trainer:
            simulation = Simulation(trainer, think_s, seed)
            memory = Memory(server.pid, simulation)
            await trainer.create_run(RunSpec(RUN, RunSettings(lease_s=LEASE_S, routes={"*": "model"})))
            before_mb, opening = memory.now(), time.perf_counter()
            await simulation.queue(-(-rollouts * 11 // 10 // GROUP))
            key = (await trainer.create_key(KeySpec("worker", RUN, 3600.0))).key
            async with Background() as start:
                start(memory.watch)
                for number in range(rollouts // OF_A_WORKER):
                    start(SimulatedWorker(f"w{number}", Remote(started["url"], key), simulation).work)
                while simulation.open < rollouts:  # noqa: ASYNC110 - workers count them
                    await asyncio.sleep(0.05)
                opened_s = time.perf_counter() - opening
                await asyncio.sleep(1.2 * think_s)  # until every agent has called
                measured = await _observe(simulation, server.pid, seconds)
            stored = sum(file.stat().st_size for file in home.glob("leyden.db*"))  # noqa: ASYNC240 - once, at the end
    finally:
        server.terminate()
        server.wait(120)
    return {
        "workers": rollouts // OF_A_WORKER,
        "opened_s": round(opened_s, 1),
        "memory_mb": memory.peaks["open"],
        "memory_before_mb": before_mb,
        **measured,
        "finished": simulation.finished,
        "lost": simulation.lost,
        "stored_mb": stored >> 20,
    }


async def _observe(simulation: Simulation, pid: int, seconds: float) -> dict[str, Any]:
    """Observe it for some seconds, and until a call was answered and a rollout is finished."""
    server = psutil.Process(pid)
    finished, cpu_s, started = simulation.finished, sum(server.cpu_times()[:2]), time.perf_counter()
    simulation.phase = "open"
    await asyncio.sleep(seconds)
    while not (simulation.calls.count("open") and simulation.finished):  # noqa: ASYNC110 - agents count them
        await asyncio.sleep(0.05)
    simulation.phase = "closing"
    took_s, cpu_s = time.perf_counter() - started, sum(server.cpu_times()[:2]) - cpu_s
    calls = simulation.calls.count("open")
    return {
        "calls_per_s": round(calls / took_s, 1),
        "rollouts_per_s": round((simulation.finished - finished) / took_s, 1),
        "heartbeats_per_s": round(simulation.heartbeats.count("open") / took_s, 1),
        "calls": simulation.calls.summary("open"),
        "heartbeats": simulation.heartbeats.summary("open"),
        "server_cpu": round(cpu_s / took_s, 2),
        "cpu_ms_per_call": round(1e3 * cpu_s / max(1, calls), 2),
    }


def summarise(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the headline, and the lines that the figures follow."""
    sizes = sorted(found)
    values = {
        "memory_mb": [found[size]["memory_mb"] for size in sizes],
        "cpu_ms_per_call": [found[size]["cpu_ms_per_call"] for size in sizes],
        "calls_p99_ms": [found[size]["calls"]["p99_ms"] for size in sizes],
    }
    per_call = values["cpu_ms_per_call"]
    return {
        "ratio": round(per_call[0] / per_call[-1], 2),
        "lines": {name: _line(sizes, of_sizes) for name, of_sizes in values.items()},
        "by_rollouts": {str(size): found[size] for size in sizes},
    }


def _line(sizes: Sequence[int], values: Sequence[float]) -> dict[str, float]:
    slope, intercept = linear_regression(sizes, values)
    return {"at_0": round(intercept, 2), "per_1000": round(1000 * slope, 3)}


def main() -> None:
    """Run what the arguments ask for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1_000, 3_000, 10_000])
    parser.add_argument("--seconds", type=float, default=30.0, help="that each size is observed for")
    parser.add_argument("--think", type=float, default=40.0, help="seconds between two calls of an agent")
    add_out(parser)
    options = parser.parse_args()
    raise_file_limit()
    found: dict[int, dict[str, Any]] = {}
    for size in options.rollouts:
        with tempfile.TemporaryDirectory() as folder:
            found[size] = asyncio.run(measure(Path(folder), size, options.seconds, options.think))
        print(f"{size} rollouts: {json.dumps(found[size])}", flush=True)
    report_result(summarise(found), options.out)


if __name__ == "__main__":
    main()
