"""Full lifecycles per second over HTTP, beside the store server of agentlightning 0.3.0 doing the same work.

A lifecycle is: create a rollout, lease it, record three model calls of 500 tokens (200 given, 300 sampled, with
logprobs), two spans and a reward, and finish. Leyden commits each step to disk before it answers; the peer keeps
everything in memory. The same load generator drives both, over the same number of connections, one server after the
other on the same machine; the peer lives in its own virtual environment (.bench/agentlightning).

    python benchmarks/store.py                  both, at 1, 100 and 1,000 workers
    python benchmarks/store.py --soak 200000    Leyden alone: is memory flat?
    python benchmarks/store.py --against ../other    beside another checkout of Leyden instead, in alternating rounds

The last line is one JSON object; `ratio` is Leyden's rate over the peer's at 1,000 workers.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import peer_agentlightning as peer
from checkouts import THIS, Measured, add_against, alternate, commits, measure, without_defaults
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from peers import free_port, install
from reporting import add_out, report_result

from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Reward, Task

WORKERS = (1, 100, 1000)

Lifecycle = Callable[[aiohttp.ClientSession, str, str, int], Awaitable[None]]


class Leyden:
    """A lifecycle as a trainer, a worker and a gateway send it."""

    def __init__(self, key: str, compatible: bool = False) -> None:
        self._compatible = compatible
        """Whether to send only fields that differ from their defaults, which an older server knows."""
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/msgpack"}
        self._accept = {**self._headers, "accept": "application/msgpack"}
        chance = random.Random(0)
        self._tokens = {
            "prompt_ids": tuple(chance.randrange(150_000) for _ in range(200)),
            "completion_ids": tuple(chance.randrange(150_000) for _ in range(300)),
            "logprobs": tuple(-chance.random() for _ in range(300)),
            "messages": ({"role": "user", "content": "a question"},),
            "response": {"role": "assistant", "content": " a" * 300},
        }

    async def create_run(self, session: aiohttp.ClientSession, base: str) -> None:
        """Create the run that all the rollouts belong to."""
        await self._post(session, f"{base}/api/runs", RunSpec("bench"))

    async def lifecycle(self, session: aiohttp.ClientSession, base: str, worker: str, number: int) -> None:
        """Take one rollout from its creation to its end, whichever rollout comes first."""
        run = f"{base}/api/runs/bench"
        group = GroupSpec(f"g{number}", Task(f"t{number}", {"question": f"task {number}"}))
        await self._post(session, f"{run}/groups", group)
        (lease,) = await self._post(session, f"{base}/api/lease", LeaseRequest(worker, wait=60))
        attempt, key = lease["attempt"]["id"], lease["key"]
        for turn in range(3):
            call = Call(f"c{turn}", **self._tokens)
            await self._post(session, f"{run}/attempts/{attempt}/calls", [call])
        await self._export(session, base, key)
        await self._post(session, f"{run}/attempts/{attempt}/rewards", [Reward("reward", 1.0)])
        report = FinishRequest(Outcome(Ending.SUCCEEDED), result="done")
        finished = await self._post(session, f"{run}/attempts/{attempt}/finish", report)
        assert finished["counted"], finished

    async def check(self, session: aiohttp.ClientSession, base: str, expected: int) -> None:
        """Fail unless the store holds that many rollouts, all succeeded, with all that they recorded."""
        async with session.get(f"{base}/api/runs/bench/summary", headers=self._accept) as response:
            summary = msgspec.msgpack.decode(await response.read())
        assert summary["rollouts"] == {"succeeded": expected}, summary
        assert summary["calls"] == 3 * expected, summary
        for number in random.Random(0).sample(range(expected), min(20, expected)):
            url = f"{base}/api/runs/bench/attempts/g{number}.0.1"
            async with session.get(url, headers=self._accept) as response:
                episode = msgspec.msgpack.decode(await response.read())
            assert len(episode["calls"]) == 3, episode
            assert tuple(episode["calls"][-1]["completion_ids"]) == self._tokens["completion_ids"]
            assert len(episode["spans"]) == 2, episode
            assert [reward["value"] for reward in episode["rewards"]] == [1.0]

    async def _post(self, session: aiohttp.ClientSession, url: str, body: Any) -> Any:
        body = without_defaults(body) if self._compatible else body
        async with session.post(url, data=msgspec.msgpack.encode(body), headers=self._accept) as response:
            reply = msgspec.msgpack.decode(await response.read()) if response.status == 200 else await response.text()
            assert response.status == 200, reply
            return reply

    async def _export(self, session: aiohttp.ClientSession, base: str, key: str) -> None:
        now, trace = time.time_ns(), os.urandom(16)
        spans = [
            Span(
                trace_id=trace,
                span_id=os.urandom(8),
                name=name,
                start_time_unix_nano=now - 10**6,
                end_time_unix_nano=now,
            )
            for name in ("tool", "step")
        ]
        batch = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])])
        headers = {"authorization": f"Bearer {key}", "content-type": "application/x-protobuf"}
        async with session.post(f"{base}/v1/traces", data=batch.SerializeToString(), headers=headers) as response:
            assert response.status == 200, await response.text()
            assert not await response.read()  # no span was rejected


async def drive(lifecycle: Lifecycle, base: str, workers: int, seconds: float, numbers: Iterator[int]) -> float:
    """Lifecycles per second of so many workers, each beginning the next when it is done with one."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        done = 0

        async def work(name: str) -> None:
            nonlocal done
            while time.perf_counter() - began < seconds:
                await lifecycle(session, base, name, next(numbers))
                done += 1

        await asyncio.gather(*(work(f"worker-{n}") for n in range(workers)))
        return done / (time.perf_counter() - began)


@contextlib.contextmanager
def leyden_server(home: Path, checkout: Path = THIS) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """Run a server of a checkout: its process, its URL and its admin key."""
    programs = Path(sys.executable).parent if checkout == THIS else checkout / ".venv" / "bin"
    command = [programs / "leyden", "serve", "--json", "--port", "0", "--home", str(home)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        running = json.loads(process.stdout.readline())
        yield process, running["url"], Path(running["admin_key_file"]).read_text().strip()
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def peer_server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start the peer's server, installed first where it is missing; yield its process and its URL."""
    python, port = str(install("agentlightning", peer.INSTALL) / "python"), free_port()
    process = subprocess.Popen(peer.command(python, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def resident(process: subprocess.Popen[bytes]) -> int:
    """Bytes of memory that a process has in use."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def measure_leyden(seconds: float, home: Path) -> dict[str, Any]:
    """Rates at each number of workers, and what a lifecycle takes in memory and on disk."""
    numbers = itertools.count()
    with leyden_server(home) as (process, base, key):
        load = Leyden(key)
        async with aiohttp.ClientSession() as session:
            await load.create_run(session, base)
        before = resident(process)
        rates = [await drive(load.lifecycle, base, workers, seconds, numbers) for workers in WORKERS]
        total = next(numbers)
        async with aiohttp.ClientSession() as session:
            await load.check(session, base, total)
        memory = resident(process) - before
    return summarise(rates, total, memory, stored(home))


async def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare two checkouts."""
    with (
        leyden_server(folder / "this", options.checkout) as (process, base, key),
        leyden_server(folder / "other", options.against) as (other_process, other_base, other_key),
    ):
        load, other_load = Leyden(key, compatible=True), Leyden(other_key, compatible=True)
        async with aiohttp.ClientSession() as session:
            await load.create_run(session, base)
            await other_load.create_run(session, other_base)
        numbers = itertools.count()

        def round_of(load: Leyden, base: str, pid: int, workers: int) -> Any:
            async def operations() -> int:
                first = next(numbers)
                await drive(load.lifecycle, base, workers, options.seconds, numbers)
                return next(numbers) - first - 1

            async def measured() -> Measured:
                return await measure(pid, operations)

            return measured

        return {
            f"at_{workers}": await alternate(
                round_of(load, base, process.pid, workers),
                round_of(other_load, other_base, other_process.pid, workers),
                options.rounds,
            )
            for workers in WORKERS
        }


async def measure_peer(seconds: float) -> dict[str, Any]:
    """Measure the same of the peer."""
    numbers = itertools.count()
    with peer_server() as (process, base):
        async with aiohttp.ClientSession() as session:
            await peer.ready(session, base)
        before = resident(process)
        rates = [await drive(peer.lifecycle, base, workers, seconds, numbers) for workers in WORKERS]
        total = next(numbers)
        async with aiohttp.ClientSession() as session:
            await peer.check(session, base, total)
        return summarise(rates, total, resident(process) - before, disk=0)


def stored(home: Path) -> int:
    """Bytes of a store on disk."""
    return sum(file.stat().st_size for file in home.glob("leyden.db*"))


def summarise(rates: list[float], total: int, memory: int, disk: int) -> dict[str, Any]:
    """Return what both sides report."""
    return {
        **{f"at_{workers}": round(rate, 1) for workers, rate in zip(WORKERS, rates, strict=True)},
        "lifecycles": total,
        "memory_bytes_each": round(memory / total),
        "disk_bytes_each": round(disk / total),
    }


async def soak(lifecycles: int, home: Path) -> dict[str, Any]:
    """Memory in the course of many lifecycles; `growth` is the last quarter's over the first's."""
    numbers = itertools.count()
    readings: list[int] = []
    with leyden_server(home) as (process, base, key):
        load = Leyden(key)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await load.create_run(session, base)

            async def work(name: str) -> None:
                while (number := next(numbers)) < lifecycles:
                    await load.lifecycle(session, base, name, number)
                    if number % (lifecycles // 20) == 0:
                        readings.append(resident(process))
                        print(f"{number:>8} lifecycles  {readings[-1] / 2**20:8.1f} MiB", flush=True)

            await asyncio.gather(*(work(f"worker-{n}") for n in range(100)))
            await load.check(session, base, lifecycles)
    quarter = len(readings) // 4
    growth = sum(readings[-quarter:]) / sum(readings[quarter : 2 * quarter])
    return {"lifecycles": lifecycles, "first_mb": readings[0] / 2**20, "last_mb": readings[-1] / 2**20, "ratio": growth}


def main() -> None:
    """Measure, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of workers")
    parser.add_argument("--soak", type=int, metavar="LIFECYCLES", help="measure Leyden's memory instead")
    add_against(parser)
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.against:
            result = asyncio.run(compare(options, Path(folder)))
            report_result(result, options.out, "against", checkouts=commits(options))
            return
        if options.soak:
            report_result(asyncio.run(soak(options.soak, Path(folder))), options.out, "soak")
            return
        ours = asyncio.run(measure_leyden(options.seconds, Path(folder)))
    theirs = asyncio.run(measure_peer(options.seconds))
    print(f"{'':24}{'leyden':>12}{'agentlightning':>16}{'ratio':>8}")
    for name in ours:
        ratio = f"{ours[name] / theirs[name]:8.1f}" if name.startswith("at_") else ""
        print(f"{name:24}{ours[name]:>12}{theirs[name]:>16}{ratio}")
    headline = f"at_{WORKERS[-1]}"
    result = {"ratio": round(ours[headline] / theirs[headline], 1), "leyden": ours, "agentlightning": theirs}
    report_result(result, options.out)


if __name__ == "__main__":
    main()
