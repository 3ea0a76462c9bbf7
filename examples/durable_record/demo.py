"""The most that works today: agents at work, a server killed under them, and nothing lost.

There is no model and no training yet. A server is started in runs/demo; workers lease rollouts of small sums, and an
"agent" that guesses answers them, recorded as a model call with its reward; halfway the server is killed with SIGKILL
and started again. Every rollout must end exactly once, with everything that was acknowledged before the kill.

The last line is one JSON object.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Reward, RunSettings, Task
from leyden.remote import Remote, RemoteError
from leyden.wire import Finish, GroupSpec, Lease, LeaseRequest, RunSpec

HOME = Path("runs/demo")
GROUPS, SIZE, WORKERS = 12, 4, 6


class Server:
    """`leyden serve` in a process of its own."""

    port = "0"

    def start(self) -> None:
        """Start it, on the same port as before."""
        command = [sys.executable, "-m", "leyden.cli", "serve", "--json", "--home", str(HOME), "--port", self.port]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.running = json.loads(self.process.stdout.readline())
        self.port = self.running["url"].rpartition(":")[2]

    def kill(self) -> None:
        """End it without a goodbye."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main() -> None:
    """Run the demonstration."""
    began = time.perf_counter()
    shutil.rmtree(HOME, ignore_errors=True)
    server = Server()
    server.start()
    print(f"A server listens on {server.running['url']}, with its store in {server.running['store']}.")
    key = Path(server.running["admin_key_file"]).read_text().strip()
    asyncio.run(demonstrate(server, key))
    for arguments in (["runs"], ["show", "demo", "g0.0"]):
        print(f"$ leyden {' '.join(arguments)} --home {HOME}", flush=True)
        subprocess.run([sys.executable, "-m", "leyden.cli", *arguments, "--home", str(HOME)], check=True)
    server.process.terminate()
    server.process.wait()
    print("\nNext: `.venv/bin/leyden serve`, then docs/api.md for the same by curl.")
    print(json.dumps({"before": None, "after": None, "steps": 0, "seconds": round(time.perf_counter() - began, 1)}))


async def demonstrate(server: Server, key: str) -> None:
    """Queue, work, kill, go on, and look whether anything is missing."""
    async with Remote(server.running["url"], key) as remote:
        await remote.create_run(RunSpec("demo", RunSettings(lease_s=2.0)))
        for number in range(GROUPS):
            a, b = random.Random(number).sample(range(2, 20), 2)
            task = Task(f"sum-{number}", {"question": f"What is {a} + {b}?", "answer": a + b})
            await remote.enqueue("demo", GroupSpec(f"g{number}", task, SIZE))
        print(f"{GROUPS} groups of {SIZE} rollouts are queued; {WORKERS} workers begin.")
        progress = Progress()
        working = [asyncio.create_task(work(remote, f"worker-{n}", progress)) for n in range(WORKERS)]
        await progress.halfway.wait()
        server.kill()
        at_kill = set(progress.acknowledged)
        print(f"The server is killed with SIGKILL after {len(at_kill)} rollouts, and started again.")
        await asyncio.to_thread(server.start)
        await asyncio.gather(*working)
        summary = await remote.summary("demo")
        kept = [await remote.rollout("demo", rollout) for rollout in at_kill]
    lost = sum(detail.rollout.outcome != Outcome(Ending.SUCCEEDED) for detail in kept)
    assert not lost, f"{lost} acknowledged rollouts were lost"
    assert summary.rollouts == {"succeeded": GROUPS * SIZE}, summary
    print(f"All {GROUPS * SIZE} rollouts ended once; of the {len(at_kill)} acknowledged before, none was lost.\n")


class Progress:
    """What the server has acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: set[str] = set()
        self.halfway = asyncio.Event()

    def add(self, rollout: str) -> None:
        """Note that a rollout is finished."""
        self.acknowledged.add(rollout)
        if len(self.acknowledged) >= GROUPS * SIZE // 2:
            self.halfway.set()


async def work(remote: Remote, worker: str, progress: Progress) -> None:
    """Lease and answer until nothing is left to do, through whatever happens to the server."""
    while True:
        try:
            leases = await remote.lease(LeaseRequest(worker, wait=1.0))
            for lease in leases:
                await guess(remote, lease)
                progress.add(lease.attempt.rollout)
            if not leases and len((await remote.summary("demo")).rollouts) == 1:
                return
        except (aiohttp.ClientError, OSError):
            await asyncio.sleep(0.1)  # the server is away
        except RemoteError as refused:
            if refused.reason != "conflict":  # a conflict: the lease ran out while the server was away
                raise


async def guess(remote: Remote, lease: Lease) -> None:
    """The "agent": it guesses, and its guess is recorded and rewarded."""
    question, answer = lease.task.input["question"], lease.task.input["answer"]
    await asyncio.sleep(0.02)  # thinking
    said = answer + random.choice([-1, 0, 0, 1])
    call = Call(
        "call-1",
        messages=({"role": "user", "content": question},),
        response={"role": "assistant", "content": str(said)},
        started=time.time(),
        ended=time.time(),
    )
    await remote.record_calls("demo", lease.attempt.id, [call])
    reward = Reward("correct", float(said == answer), source="demo")
    report = Finish(Outcome(Ending.SUCCEEDED), result=said, rewards=(reward,))
    await remote.finish("demo", lease.attempt.id, report)


if __name__ == "__main__":
    main()
