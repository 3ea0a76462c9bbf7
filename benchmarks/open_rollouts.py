"""10,000 rollouts open at once with slow agents on one server process, undisturbed and then under attack.

Every rollout is leased, has its own key and its own connection, and calls a model now and then; workers renew the
leases. The model is scripted and answers 48 calls at once in a quarter of a second; four greedy rollouts always have 16
calls in flight each, so that slots are scarce. Two processes send the load: this one the agents and the probes,
`hostile_clients.py` the attacks: idle connections, half requests, slow readers, streams that nobody reads, bodies of
100 MB, and headers without end.

    python benchmarks/open_rollouts.py
    python benchmarks/open_rollouts.py --rollouts 300 --seconds 3 --think 2

First nothing is open, then all rollouts are, then the server is attacked in one way after another, and last in all ways
at once. In each phase, probes measure the latency of a heartbeat (a write to the store) and of a model call. One run
has a tenth of the rollouts, another the rest: a fair server answers both alike. When all are finished, as many are
opened and finished once more, to see whether the server's memory grows. The last line is one JSON object:
`ratio` is the 99th percentile of a heartbeat under all attacks over that without attacks.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import psutil
from hostile_clients import CONNECTIONS
from reporting import add_out, report_result

from leyden.api.client import Remote, read_key
from leyden.api.wire import FinishRequest, GroupSpec, HeartbeatRequest, Lease, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.process.resources import raise_file_limit
from leyden.records import RunSettings, Task

HERE = Path(__file__).parent
LEASE_S, HEARTBEAT_S = 60.0, 10.0
MAX_LEASES = 1000
GREEDY, GREEDY_CALLS = 4, 16
HOSTILE = 16
PROBE_PAUSE_S = 0.05
FINISHING = 64
QUESTION = [{"role": "user", "content": "What is the answer to life, the universe and everything?"}]


class Connection:
    """One connection of an agent, kept open between calls."""

    def __init__(self, url: str, key: str) -> None:
        self._host, _, port = url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        body = json.dumps({"model": "model", "messages": QUESTION}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {key}\r\n"
        self._request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self) -> int:
        """Call the model once and return the status; a connection that was idle for too long is replaced."""
        if self._streams is not None:
            try:
                return await self._send(*self._streams)
            except (OSError, asyncio.IncompleteReadError):
                self.close()
        self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 14)
        return await self._send(*self._streams)

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
        await reader.readexactly(int(length.partition(":")[2]))
        return int(head.split(" ", 2)[1])

    def close(self) -> None:
        """Close it."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


class Latencies:
    """Seconds that requests took, by phase."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    def add(self, phase: str, seconds: float) -> None:
        """Add a request of a phase."""
        self._taken.setdefault(phase, []).append(seconds)

    def count(self, phase: str) -> int:
        """Return the number of requests of a phase."""
        return len(self._taken.get(phase, ()))

    def percentile(self, phase: str, share: float) -> float:
        """Return a percentile of a phase, in milliseconds."""
        taken = sorted(self._taken[phase])
        return round(1e3 * taken[min(len(taken) - 1, int(share * len(taken)))], 1)

    def summary(self, phase: str) -> dict[str, float]:
        """Return count and percentiles of a phase."""
        if not self.count(phase):
            return {"count": 0}
        p50, p99, longest = (self.percentile(phase, share) for share in (0.5, 0.99, 1.0))
        return {"count": self.count(phase), "p50_ms": p50, "p99_ms": p99, "max_ms": longest}


class Load:
    """Agents, workers and probes against one server."""

    def __init__(self, remote: Remote, think_s: float, seed: int) -> None:
        self._remote, self._think_s, self._rng = remote, think_s, random.Random(seed)
        self.phase = "before"
        self.calls: Counter[str] = Counter()
        """Answered calls of each attempt."""
        self.statuses: Counter[int] = Counter()
        self.broken: Counter[str] = Counter()
        self.ended: set[str] = set()
        """Attempts that a heartbeat says have ended, though none of their agents is done."""
        self.heartbeats, self.models = Latencies(), Latencies()
        self.runs = {"small": Latencies(), "large": Latencies()}
        """Calls of the agents of each run."""

    async def stay_in(self, phase: str, seconds: float) -> None:
        """Let a phase last for some seconds, and until both probes were answered in it."""
        self.phase = phase
        await asyncio.sleep(seconds)
        while not (self.heartbeats.count(phase) and self.models.count(phase)):  # noqa: ASYNC110 - as the probes do
            await asyncio.sleep(PROBE_PAUSE_S)

    async def act(self, lease: Lease) -> None:
        """Be an agent: call the model, think, and so on until cancelled."""
        connection, name = Connection(lease.url, lease.key), lease.attempt.id
        try:
            await asyncio.sleep(self._rng.uniform(0, self._think_s))
            while True:
                await self._timed_call(connection, self.runs[lease.attempt.run], name)
                await asyncio.sleep(self._rng.uniform(0.9, 1.05) * self._think_s)
        finally:
            connection.close()

    async def be_greedy(self, lease: Lease) -> None:
        """Call the model again and again."""
        connection = Connection(lease.url, lease.key)
        try:
            while True:
                self.statuses[await connection.call()] += 1
        finally:
            connection.close()

    async def renew(self, worker: str, leases: list[Lease]) -> None:
        """Be a worker: renew the leases of its attempts."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            reply = await self._remote.heartbeat(
                worker, HeartbeatRequest(tuple([lease.attempt.id for lease in leases]))
            )
            self.ended |= {ended.attempt for ended in reply.ended}

    async def probe_heartbeats(self, lease: Lease) -> None:
        """Measure heartbeats of one attempt."""
        while True:
            phase, started = self.phase, time.perf_counter()
            await self._remote.heartbeat("probe", HeartbeatRequest((lease.attempt.id,)))
            self.heartbeats.add(phase, time.perf_counter() - started)
            await asyncio.sleep(PROBE_PAUSE_S)

    async def probe_model(self, lease: Lease) -> None:
        """Measure model calls of one attempt."""
        connection = Connection(lease.url, lease.key)
        while True:
            await self._timed_call(connection, self.models, lease.attempt.id)
            await asyncio.sleep(PROBE_PAUSE_S)

    async def _timed_call(self, connection: Connection, latencies: Latencies, attempt: str) -> None:
        phase, started = self.phase, time.perf_counter()
        try:
            status = await connection.call()
        except (OSError, asyncio.IncompleteReadError) as error:
            self.broken[f"{type(error).__name__}: {error}"] += 1
            return
        self.statuses[status] += 1
        self.calls[attempt] += 1
        latencies.add(phase, time.perf_counter() - started)


async def open_rollouts(remote: Remote, run: str, count: int, worker: str) -> list[Lease]:
    """Queue and lease rollouts of a run."""
    await remote.enqueue(run, GroupSpec(f"{run}-{worker}", Task("t", {}), size=count))
    leases: list[Lease] = []
    while len(leases) < count:
        request = LeaseRequest(worker, min(MAX_LEASES, count - len(leases)), run=run, wait=5.0)
        leases += await remote.lease(request)
    return leases


Starter = Callable[..., "asyncio.Task[None]"]


async def open_wave(remote: Remote, load: Load, start: Starter, rollouts: int, wave: str) -> list[Lease]:
    """Open rollouts of both runs, with their workers and agents."""
    leases: list[Lease] = []
    few = max(1, rollouts // 10)
    for run, count in (("small", few), ("large", rollouts - few)):
        for number, first in enumerate(range(0, count, MAX_LEASES)):
            worker = f"{run}-{wave}-{number}"
            opened = await open_rollouts(remote, run, min(MAX_LEASES, count - first), worker)
            leases += opened
            start(load.renew, worker, opened)
            for lease in opened:
                start(load.act, lease)
    return leases


async def finish_all(remote: Remote, leases: list[Lease]) -> int:
    """Finish attempts, and return how many counted."""
    counted = 0
    upcoming = iter(leases)

    async def finish() -> None:
        nonlocal counted
        for lease in upcoming:
            report = FinishRequest(Outcome(Ending.SUCCEEDED), result=1)
            reply = await remote.finish(lease.attempt.run, lease.attempt.id, report)
            counted += reply.counted

    await asyncio.gather(*(finish() for _ in range(FINISHING)))
    return counted


class Attack:
    """`hostile_clients.py` as a process."""

    def __init__(self, url: str, leases: list[Lease], kinds: Iterable[str], scale: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "hostile_clients.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        options = {"url": url, "keys": [lease.key for lease in leases], "kinds": list(kinds), "scale": scale}
        self._process.stdin.write(json.dumps(options).encode() + b"\n")
        self._process.stdin.flush()

    async def stop(self) -> dict[str, int]:
        """End it; returns how often each attack was made."""
        printed, _ = await asyncio.to_thread(self._process.communicate, b"")
        if self._process.returncode != 0:
            raise SystemExit("the hostile clients failed")
        counts: dict[str, int] = json.loads(printed)
        return counts

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


class Memory:
    """Resident memory of the server: watched, with the largest value of each phase."""

    def __init__(self, pid: int, load: Load) -> None:
        self._server, self._load = psutil.Process(pid), load
        self.peaks: dict[str, int] = {}

    def now(self) -> int:
        """Return it in MB."""
        return int(self._server.memory_info().rss) >> 20

    async def watch(self) -> None:
        """Keep the largest value of each phase."""
        while True:
            self.peaks[self._load.phase] = max(self.peaks.get(self._load.phase, 0), self.now())
            await asyncio.sleep(0.1)


async def measure(home: Path, rollouts: int, seconds: float, think_s: float, scale: float, seed: int = 1) -> Any:
    """Run the three phases against a server in its own process; returns what happened."""
    raise_file_limit()
    with (home / "server.log").open("wb") as log:
        command = [sys.executable, str(HERE / "scripted_server.py"), str(home), "slow"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)  # noqa: ASYNC220 - it returns at once
    attack: Attack | None = None
    try:
        assert server.stdout is not None
        started = json.loads(server.stdout.readline())
        async with Remote(started["url"], read_key(Path(started["admin_key_file"]))) as remote:
            load = Load(remote, think_s, seed)
            memory = Memory(server.pid, load)
            async with Background() as start:
                start(memory.watch)
                for run in ("large", "small", "greedy", "hostile", "probe"):
                    settings = RunSettings(lease_s=LEASE_S, max_calls=10**6, routes={"*": "model", "long": "long"})
                    await remote.create_run(RunSpec(run, settings))
                (probe, other) = await open_rollouts(remote, "probe", 2, "probe")
                start(load.probe_heartbeats, probe)
                start(load.probe_model, other)
                start(load.renew, "probe", [probe, other])
                await load.stay_in("before", seconds / 3)
                memory_at_start = memory.now()
                load.phase = "opening"
                leases = await open_wave(remote, load, start, rollouts, "first")
                greedy = await open_rollouts(remote, "greedy", GREEDY, "greedy")
                hostile = await open_rollouts(remote, "hostile", HOSTILE, "hostile")
                start(load.renew, "greedy", greedy)
                start(load.renew, "hostile", hostile)
                for lease in greedy:
                    for _ in range(GREEDY_CALLS):
                        start(load.be_greedy, lease)
                await asyncio.sleep(1.1 * think_s)  # until every agent has called
                await load.stay_in("open", seconds)
                attacks: dict[str, int] = {}
                for phase, kinds in {**{kind: [kind] for kind in CONNECTIONS}, "all": list(CONNECTIONS)}.items():
                    load.phase = "starting an attack"
                    attack = Attack(started["url"], hostile, kinds, scale)
                    await asyncio.sleep(seconds / 10)
                    await load.stay_in(phase, seconds if phase == "all" else seconds / 3)
                    load.phase = "ending an attack"
                    attacks |= await attack.stop()
            open_now = [*leases, *greedy, *hostile, probe, other]
            counted = await finish_all(remote, open_now)
            recorded = sum([(await remote.summarise_run(run)).calls for run in ("large", "small", "greedy", "probe")])
            attempts = [lease.attempt.id for lease in leases]
            memory_at_end = memory.now()
            async with Background() as start:  # what the first wave left must serve the second
                again = await open_wave(remote, Load(remote, think_s, seed), start, rollouts, "second")
                await asyncio.sleep(1.1 * think_s)
            await finish_all(remote, again)
            memory_after_second_wave = memory.now()
    finally:
        if attack is not None:
            attack.kill()
        server.terminate()
        exit_status = server.wait(120)
    phases = ("open", *CONNECTIONS, "all")
    return {
        "ratio": round(load.heartbeats.percentile("all", 0.99) / load.heartbeats.percentile("open", 0.99), 2),
        "rollouts": len(leases),
        "heartbeats": {phase: load.heartbeats.summary(phase) for phase in ("before", *phases)},
        "model_calls": {phase: load.models.summary(phase) for phase in ("before", *phases)},
        "calls_of_agents": {
            run: {phase: latencies.summary(phase) for phase in phases} for run, latencies in load.runs.items()
        },
        "agents_without_an_answer": sum(not load.calls[attempt] for attempt in attempts),
        "memory_mb": {
            "before": memory_at_start,
            **{phase: memory.peaks[phase] for phase in phases},
            "all finished": memory_at_end,
            "second wave finished": memory_after_second_wave,
        },
        "statuses": {str(status): count for status, count in sorted(load.statuses.items())},
        "broken": dict(load.broken),
        "ended_early": len(load.ended),
        "unfinished": len(open_now) - counted,
        "unrecorded": max(0, load.statuses[200] - recorded),
        "attacks": attacks,
        "exit_status": exit_status,
    }


class Background:
    """Runs coroutines until the context ends; an error of one ends the context with that error."""

    async def __aenter__(self) -> Starter:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._running: list[asyncio.Task[None]] = []
        return self._start

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for task in self._running:
            task.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    def _start(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> "asyncio.Task[None]":
        task = self._tasks.create_task(work(*arguments))
        self._running.append(task)
        return task


def main() -> None:
    """Run what the arguments ask for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the two long phases")
    parser.add_argument("--think", type=float, default=70.0, help="seconds between two calls of an agent")
    parser.add_argument("--scale", type=float, default=1.0, help="of the attack")
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.rollouts, options.seconds, options.think, options.scale)
        report_result(asyncio.run(measured), options.out)


if __name__ == "__main__":
    main()
