"""Measures the rollouts per second of one worker against the same model calls without rollouts.

The agent makes one model call, which a scripted model answers at once. A function runs in the threads of one host
process, a command (sh and curl) as one process per rollout. Each rollout is leased, run and reported with its reward,
and each of these is on disk before it counts.

    python benchmarks/workers.py

The limit is measured in the same run, on the same machine and server: the same function, called as often from as many
threads of one process, for attempts that do not end. `ratio` is the rate of functions divided by that limit: the share
of a machine's calls that remains when each is a whole rollout. `first_call_ms` is the median time from queueing a
rollout until its call reaches the server, with a worker that waits for it. `cpu_ms` is the CPU time of a rollout in
each process. The last line is one JSON object.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import workers_agent
from checkouts import Run, add_against, alternate_runs, commits, compare_medians
from gateway import leyden_server
from reporting import add_out, report_result

from leyden.api.client import Remote
from leyden.api.wire import EventCursor, GroupSpec, KeySpec, LeaseRequest, RunSpec
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.process import WorkerProcess
from leyden.process import guardian
from leyden.records import EventKind, RunSettings, Task

HERE = Path(__file__).parent
WARM_UP = 64
KINDS = ("callables", "commands")


class Bench:
    """A run on a server in which rollouts are queued and timed."""

    def __init__(self, remote: Remote, run: str) -> None:
        self._remote, self._run = remote, run
        self._groups = 0
        self._after = 0

    async def finish(self, rollouts: int) -> float:
        """Run rollouts and return the seconds they took."""
        self._groups += 1
        began = time.perf_counter()
        spec = GroupSpec(f"{self._run}-{self._groups}", Task("t", {}), rollouts)
        await self._remote.enqueue(self._run, spec)
        while not (
            log := await self._remote.follow_events(
                self._run, EventCursor(self._after, wait=300, kind=EventKind.GROUP_FINISHED)
            )
        ).events:
            pass
        self._after = log.after
        return time.perf_counter() - began

    async def first_call_ms(self) -> float:
        """Milliseconds from queueing a rollout to its model call."""
        queued = time.time()
        await self.finish(1)
        (episode,) = await self._remote.group_episodes(self._run, f"{self._run}-{self._groups}")
        assert episode.final_reward(0.0) == 1.0, episode.attempt.outcome
        return (episode.calls[0].started - queued) * 1e3


def cpu_s(server: psutil.Process, worker: psutil.Process, hosts: list[psutil.Process]) -> dict[str, float]:
    """User and system CPU seconds so far; `agents` are the processes of commands that have ended."""
    times = [host.cpu_times() for host in hosts]
    return {
        "server": sum(server.cpu_times()[:2]),
        "worker": sum(worker.cpu_times()[:2]),
        "host": sum(each.user + each.system for each in times),
        "agents": sum(each.children_user + each.children_system for each in times),
    }


async def measure(remote: Remote, name: str, agent: str, rollouts: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one kind of agent."""
    await remote.create_run(RunSpec(name, RunSettings(lease_s=60)))
    key = (await remote.create_key(KeySpec("worker", name))).key
    worker = WorkerProcess(
        WorkerOptions(server=remote.url, run=name, agent=agent, base=str(HERE), concurrency=options.concurrency), key
    )
    bench = Bench(remote, name)
    try:
        await bench.finish(WARM_UP)
        descendants = psutil.Process(worker.process.pid).children(recursive=True)
        hosts = [process for process in descendants if process.name() != guardian.NAME][:1]
        here = psutil.Process()
        server = next(process for process in here.children() if "scripted_server.py" in " ".join(process.cmdline()))
        parts = (server, psutil.Process(worker.process.pid), hosts)
        before = cpu_s(*parts)
        took = await bench.finish(rollouts)
        spent = {part: round(1e3 * (after - before[part]) / rollouts, 2) for part, after in cpu_s(*parts).items()}
        first = statistics.median([await bench.first_call_ms() for _ in range(30)])
    finally:
        await worker.end()
    return {"per_s": round(rollouts / took, 1), "first_call_ms": round(first, 2), "cpu_ms": spent}


async def measure_calls(remote: Remote, calls: int, threads: int) -> float:
    """Return the limit: calls per second of the agent's function alone, for attempts that do not end."""
    await remote.create_run(RunSpec("bare", RunSettings(lease_s=3600)))
    await remote.enqueue("bare", GroupSpec("bare", Task("t", {}), threads))
    leases = await remote.lease(LeaseRequest("w", threads, run="bare"))

    def ask(number: int) -> None:
        workers_agent.ask(f"{remote.url}/v1", leases[number % threads].key)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(ask, range(WARM_UP)))
        began = time.perf_counter()
        await asyncio.to_thread(lambda: list(pool.map(ask, range(calls))))
        return round(calls / (time.perf_counter() - began), 1)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Compare two checkouts; the CPU time of a rollout is that of all its processes."""
    sizes = ("--rollouts", str(options.rollouts), "--concurrency", str(options.concurrency))
    pairs = alternate_runs(options, "workers.py", *sizes)

    def of(*path: str) -> dict[str, Any]:
        return compare_medians([(value(mine, *path), value(theirs, *path)) for mine, theirs in pairs])

    def value(run: Run, *path: str) -> float:
        found = run.result
        for name in path:
            found = found[name]
        return sum(found.values()) if isinstance(found, dict) else float(found)

    names = ("callables_per_s", "commands_per_s", "calls_per_s", "first_call_ms")
    return {**{name: of(name) for name in names}, **{f"cpu_ms_{kind}": of("cpu_ms", kind) for kind in KINDS}}


async def main() -> None:
    """Measure, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000, help="of functions, and calls of the limit")
    parser.add_argument("--concurrency", type=int, default=32)
    add_against(parser)
    add_out(parser)
    options = parser.parse_args()
    if options.against:
        report_result(compare(options), options.out, "against", checkouts=commits(options))
        return
    with tempfile.TemporaryDirectory() as folder, leyden_server(Path(folder)) as (url, key, _):
        async with Remote(url, key) as remote:
            limit = await measure_calls(remote, options.rollouts, options.concurrency)
            functions = await measure(remote, "functions", "workers_agent.py:answer", options.rollouts, options)
            commands = await measure(remote, "commands", "./workers_agent.sh", options.rollouts // 5, options)
    print(f"{'calls alone':12}{limit:>8} a second")
    for name, result in (("functions", functions), ("commands", commands)):
        cpu = ", ".join(f"{part} {ms}" for part, ms in result["cpu_ms"].items())
        print(f"{name:12}{result['per_s']:>8} a second; ms of CPU each: {cpu}; first call {result['first_call_ms']} ms")
    result = {
        "ratio": round(functions["per_s"] / limit, 2),
        "callables_per_s": functions["per_s"],
        "commands_per_s": commands["per_s"],
        "first_call_ms": functions["first_call_ms"],
        "calls_per_s": limit,
        "cpu_ms": {"callables": functions["cpu_ms"], "commands": commands["cpu_ms"]},
    }
    report_result(result, options.out)


if __name__ == "__main__":
    asyncio.run(main())
