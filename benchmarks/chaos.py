"""Faults in turn, under load, and exact accounts at the end: nothing acknowledged lost, nothing counted twice.

A server, a worker with host processes and clients that record without pause, connected through a proxy. The agents call
a model that an engine process serves: `leyden serve --model spark`, the server's upstream. Every second or so one fault
strikes: SIGKILL of server, worker, host or engine, SIGSTOP and SIGCONT of server or worker, a disk that is full and
freed (a limit of file size), a network that is cut, a clock that steps. Then a training (`leyden train`) of which
trainer, server, worker and host are killed in turn. Its engine is in the trainer's process and dies with it; with
`--vllm` it is a vLLM, which is killed in turn too.

    python benchmarks/chaos.py                  60 faults, then 12 kills in a training
    python benchmarks/chaos.py --faults 1000 --training 40
    python benchmarks/chaos.py --faults 0 --training 10 --vllm .venv-vllm/bin/python
    python benchmarks/chaos.py --faults 0 --no-replay       how much is sampled again without the record

The last line is one JSON object: `kills` counts all faults, `lost` what was acknowledged and is not there, `twice` what
counted more than once, `left_behind` the processes that are left at the end; `ratio` is 1 if there are none of these
three. `resampled` counts the answers of the training that were recorded before a kill and are not in the attempt that
its rollout ended with, out of all `sampled` ones, and `anew` those among them whose rollout ended twice at one call and
was begun anew, as it may have been its fault. `--out FOLDER` keeps it as `benchmark.json`; without faults
under load as `training.json` or `training_without_replay.json`, and with vLLM as `vllm.json`.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import psutil
from reporting import add_out, report_result

from leyden.api.client import Remote, RemoteError, read_key
from leyden.api.wire import EventCursor, FinishRequest, GroupSpec, KeySpec, LeaseRequest, RunSpec
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.process import WorkerProcess
from leyden.config.schema import WorkerConfig
from leyden.outcomes import Ending, Outcome
from leyden.process import guardian
from leyden.process.rotating_log import RotatingLog
from leyden.records import Call, EventKind, Reward, RewardKind, RunSettings, State, Task
from leyden.server.options import RunningServer

HERE = Path(__file__).parent
LAUNCHER = HERE / "chaos_server.py"
MARK = "LEYDEN_CHAOS_RUN"
CLIENTS, GROUP = 4, 2
FAULTS = ("server", "worker", "host", "engine", "stall server", "disk", "network", "stall worker", "clock")
KILLS_IN_TRAINING = ("server", "host", "trainer", "worker")
KILLS_WITH_VLLM = ("server", "host", "trainer", "engine", "engine", "worker")
"""The second kill of the engine in a row strikes while it is started again."""
UNANSWERED = (aiohttp.ClientError, ConnectionError, TimeoutError)
FINISH_TIMEOUT_S = 300.0


class Accounts(msgspec.Struct):
    """The result."""

    kills: int = 0
    lost: int = 0
    twice: int = 0
    left_behind: int = 0
    sampled: int = 0
    resampled: int = 0
    anew: int = 0


class Proxy:
    """Forwards connections to a server. `cut` breaks them all and refuses new ones for a while."""

    def __init__(self) -> None:
        self.port = self.target = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen, on the same port every time."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Refuse connections and break those that are open."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def cut(self, seconds: float) -> None:
        """Be away for some seconds."""
        self.stop()
        await asyncio.sleep(seconds)
        await self.start()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            answers, other = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(other)
            await asyncio.gather(_pump(reader, other), _pump(answers, writer))
        except OSError:
            pass
        finally:
            for one in filter(None, (writer, other)):
                self._writers.discard(one)
                one.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("the other side has closed")


class Load:
    """Clients that work without pause, and write down only what the server has acknowledged."""

    def __init__(self, remote: Remote, rng: random.Random, calls_model: bool) -> None:
        self._remote, self._rng, self._calls_model = remote, rng, calls_model
        self._numbers = itertools.count()
        self.groups: dict[str, set[str]] = {"records": set(), "agents": set()}
        self._calls: dict[str, set[str]] = {}
        self._rewards: set[str] = set()
        self._counted: Counter[str] = Counter()
        self.stopping = False

    async def queue_groups(self, run: str, pause_s: float) -> None:
        """Queue groups of a run; `agents` are run by the real worker, `records` by the clients below."""
        while not self.stopping:
            name = f"{run}-{next(self._numbers)}"
            with suppress(*UNANSWERED, RemoteError):
                await self._remote.enqueue(run, GroupSpec(name, self._task(), GROUP))
                self.groups[run].add(name)
            await asyncio.sleep(pause_s)

    def _task(self) -> Task:
        return Task("t", {"s": self._rng.uniform(0, 0.3), "calls_model": self._calls_model})

    async def work(self, worker: str) -> None:
        """Lease rollouts of `records` and record calls, a reward and the end of each."""
        while True:
            try:
                leases = await self._remote.lease(LeaseRequest(worker, wait=0.2, run="records"))
                if not leases and self.stopping and await self._is_done("records"):
                    return
                for lease in leases:
                    await self._attempt(lease.attempt.id)
            except UNANSWERED:
                await asyncio.sleep(0.05)
            except RemoteError as refused:
                if refused.reason not in ("conflict", "store_unavailable", "not_found"):
                    raise
                await asyncio.sleep(0.05)

    async def _attempt(self, id: str) -> None:
        for turn in range(3):
            call = Call(f"c{turn}", prompt_ids=(1, 2), completion_ids=(3,))
            await self._remote.record_calls("records", id, [call])
            self._calls.setdefault(id, set()).add(call.id)
        await self._remote.record_rewards("records", id, [Reward("step", 0.5, RewardKind.STEP)])
        self._rewards.add(id)
        report = FinishRequest(Outcome(Ending.SUCCEEDED), result=id, rewards=(Reward("final", 1.0),))
        if (await self._remote.finish("records", id, report)).counted:
            self._counted[id] += 1

    async def _is_done(self, run: str) -> bool:
        return not set((await self._remote.summarise_run(run)).rollouts) & {State.QUEUED, State.RUNNING}

    async def wait_done(self) -> None:
        """Wait until the worker has finished its rollouts, too."""
        cursor = 0
        while not await self._is_done("agents"):
            cursor = (await self._remote.follow_events("agents", EventCursor(cursor, wait=5.0))).after

    async def check(self, accounts: Accounts) -> None:
        """Compare what was acknowledged with what the server has."""
        for run, groups in self.groups.items():
            for group in groups:
                episodes = []
                with suppress(RemoteError):
                    episodes = await self._remote.group_episodes(run, group)
                whole = [one for one in episodes if one.rollout.outcome == Outcome(Ending.SUCCEEDED)]
                accounts.lost += GROUP - len(whole)
            succeeded: Counter[str] = Counter()
            cursor = 0
            while events := (
                log := await self._remote.follow_events(run, EventCursor(cursor, kind=EventKind.ATTEMPT_ENDED))
            ).events:
                cursor = log.after
                succeeded.update(e.data["rollout"] for e in events if e.data["ending"] == Ending.SUCCEEDED)
            accounts.twice += sum(count - 1 for count in succeeded.values())
        accounts.twice += sum(count - 1 for count in self._counted.values())
        for id, calls in self._calls.items():
            try:
                episode = await self._remote.get_episode("records", id)
            except RemoteError:
                accounts.lost += len(calls)
                continue
            accounts.lost += len(calls - {call.id for call in episode.calls})
            accounts.lost += id in self._rewards and "step" not in {reward.id for reward in episode.rewards}
            accounts.lost += id in self._counted and episode.attempt.outcome != Outcome(Ending.SUCCEEDED)


class EngineProcess:
    """A model served by the embedded engine in its own process, on the same port every time."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self._home, self._port = home, "0"
        self._process: subprocess.Popen[bytes]
        self.url = ""

    def start(self) -> None:
        """Start it and wait until it listens."""
        words = ("serve", "--json", "--model", "spark", "--home", str(self._home), "--port", self._port)
        with (self._home / "engine.log").open("ab") as log:
            command = [sys.executable, "-m", "leyden", *words]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        running = msgspec.json.decode(self._process.stdout.readline(), type=RunningServer)
        self.url = f"{running.url}/v1"
        self._port = running.url.rpartition(":")[2]

    def kill(self) -> None:
        """Kill the process that computes; its server process ends with it."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it, as a user would."""
        self._process.terminate()
        self._process.wait()


class Stage:
    """Engine, server, worker and proxy, and what can happen to them."""

    def __init__(self, home: Path, launcher: Path, rng: random.Random) -> None:
        self.home, self._launcher, self._rng = home, launcher, rng
        self.proxy = Proxy()
        self.engine: EngineProcess | None = None
        self._port = "0"
        self.server: subprocess.Popen[bytes]
        self.worker: WorkerProcess
        self.key = ""
        self._clock = itertools.cycle((signal.SIGUSR1, signal.SIGUSR2))

    def start_server(self) -> RunningServer:
        """Start the server, on the same port every time."""
        words = ["serve", "--json", "--home", str(self.home), "--port", self._port]
        words += [] if self.engine is None else ["--upstream", self.engine.url]
        with (self.home / "server.log").open("ab") as log:
            command = [sys.executable, str(self._launcher), *words]
            self.server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.server.stdout is not None
        running = msgspec.json.decode(self.server.stdout.readline(), type=RunningServer)
        self._port = running.url.rpartition(":")[2]
        self.proxy.target = int(self._port)
        return running

    def start_worker(self) -> None:
        """Start the worker, with the proxy as its server."""
        options = WorkerOptions(
            server=f"http://127.0.0.1:{self.proxy.port}",
            run="agents",
            agent="chaos_agent.py:act",
            base=str(HERE),
            concurrency=4,
            processes=1,
            workers=WorkerConfig(drain_s=2.0),
            name=f"w-{uuid4().hex[:8]}",
        )
        self.worker = WorkerProcess(options, self.key, RotatingLog(self.home / "worker.log"))

    async def strike(self, fault: str) -> None:
        """Let one thing happen, and mend it."""
        match fault:
            case "server":
                self.server.kill()
                self.server.wait()
                await asyncio.to_thread(self.start_server)
            case "worker":
                self.worker.process.kill()
                await asyncio.to_thread(self.worker.process.wait)
                self.start_worker()
            case "host":
                for host in _hosts(self.worker.process.pid):
                    host.kill()
            case "engine":
                assert self.engine is not None
                self.engine.kill()
                await asyncio.to_thread(self.engine.start)
            case "stall server" | "stall worker":
                process = self.server if fault == "stall server" else self.worker.process
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(self._rng.uniform(1.5, 3.0))
                process.send_signal(signal.SIGCONT)
            case "disk":
                _, hard = resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE, (4096, hard))
                await asyncio.sleep(self._rng.uniform(0.5, 2.0))
                resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
            case "network":
                await self.proxy.cut(self._rng.uniform(0.5, 2.0))
            case "clock":
                self.server.send_signal(next(self._clock))

    async def stop(self) -> None:
        """End everything, as a user would."""
        self.worker.stop()
        await asyncio.to_thread(self.worker.process.wait)
        self.proxy.stop()
        self.server.terminate()
        await asyncio.to_thread(self.server.wait)
        if self.engine is not None:
            await asyncio.to_thread(self.engine.stop)


def _hosts(worker: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [one for one in psutil.Process(worker).children(recursive=True) if _runs(one, "leyden.client.host")]
    return []


def _runs(process: psutil.Process, module: str) -> bool:
    with suppress(psutil.Error):
        return any(word.startswith(module) for word in process.cmdline())
    return False


async def strike_under_load(
    home: Path, faults: Sequence[str], rng: random.Random, accounts: Accounts, launcher: Path = LAUNCHER
) -> None:
    """Let faults strike a server, a worker and their clients, and account for everything."""
    stage = Stage(home, launcher, rng)
    if "engine" in faults:
        stage.engine = EngineProcess(home / "engine")
        await asyncio.to_thread(stage.engine.start)
    running = await asyncio.to_thread(stage.start_server)
    await stage.proxy.start()
    async with Remote(f"http://127.0.0.1:{stage.proxy.port}", read_key(Path(running.admin_key_file))) as remote:
        for run in ("records", "agents"):
            await remote.create_run(RunSpec(run, RunSettings(lease_s=2.0, max_attempts=100)))
        stage.key = (await remote.create_key(KeySpec("worker", "agents"))).key
        load = Load(remote, rng, calls_model=stage.engine is not None)
        stage.start_worker()
        working = [asyncio.create_task(load.work(f"c{number}")) for number in range(CLIENTS)]
        working += [asyncio.create_task(load.queue_groups(run, 0.1)) for run in load.groups]
        try:
            for fault in faults:
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                await stage.strike(fault)
                accounts.kills += 1
                _print_progress(accounts)
            load.stopping = True
            await asyncio.wait_for(asyncio.gather(*working), FINISH_TIMEOUT_S)
            await asyncio.wait_for(load.wait_done(), FINISH_TIMEOUT_S)
            await load.check(accounts)
        finally:
            for task in working:
                task.cancel()
            await stage.stop()


TORCH = '{kind = "torch"}'
VLLM = '{kind = "vllm", vllm_python = "%s", vllm_arguments = ["--enforce-eager", "--max-num-seqs", "32"]}'
AGENT = """
import time
from openai import OpenAI

client = OpenAI()


def solve(task):
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(6):
        time.sleep(0.2)
        said = client.chat.completions.create(model="spark", messages=messages, max_tokens=8)
        messages += [said.choices[0].message, {"role": "user", "content": "And then?"}]
    return said.choices[0].message.content


def reward(task, result):
    return float(len(result or "") % 2)
"""
CONFIG = """
run = "chaos"
agent = "agent.py:solve"
reward = "agent.py:reward"
tasks = "tasks.jsonl"
held_out = 0
rollout = {lease_s = 2, max_attempts = 100, replay = %s}
training = {steps = %d, tasks_per_step = 2, group_size = 3, learning_rate = 1e-4}
checkpoints = {every = 2}
engine = %s
"""


IN_FLIGHT = """
SELECT coalesce(max(made), 0) FROM (
    SELECT count(*) AS made FROM calls JOIN attempts ON attempts.id = calls.attempt_id
    WHERE attempts.ended IS NULL GROUP BY calls.attempt_id
)
"""
"""The most calls that an attempt has made which has not ended: kills strike after a random one."""
STRUCK = """
SELECT count(*) FROM attempts now JOIN attempts before ON before.rollout_id = now.rollout_id
WHERE now.ended IS NULL AND instr(before.message, 'killed by SIGKILL')
"""
"""Attempts whose host may not be killed: by its second death a rollout has failed, because its agent may cause them."""
FAILED = "SELECT id FROM rollouts WHERE state = 'finished' AND ending != 'succeeded'"
"""Rollouts that are shown at the end, because there should be none."""
RESAMPLED = """
WITH answers AS (SELECT NOT EXISTS (
    SELECT 1 FROM attempts last JOIN calls kept ON kept.attempt_id = last.id
    WHERE last.rollout_id = rollouts.id AND last.number = rollouts.attempts AND kept.id = calls.id
) AS lost, EXISTS (
    SELECT 1 FROM attempts later
    WHERE later.rollout_id = rollouts.id AND later.number > attempts.number AND later.origin IS NULL
) AS anew
FROM calls JOIN attempts ON attempts.id = calls.attempt_id JOIN rollouts ON rollouts.id = attempts.rollout_id
WHERE calls.status = 'ok' AND calls.origin IS NULL AND rollouts.state = 'finished')
SELECT count(*), coalesce(sum(lost), 0), coalesce(sum(lost AND anew), 0) FROM answers
"""


def kill_in_training(
    folder: Path, kills: int, rng: random.Random, accounts: Accounts, vllm: str | None = None, replay: bool = True
) -> None:
    """Kill the processes of a training in turn until it is done, and account for its rollouts.

    With `vllm`, an interpreter that has vLLM, the engine is a vLLM and is killed too.
    """
    steps = 4 + kills
    targets = KILLS_IN_TRAINING if vllm is None else KILLS_WITH_VLLM
    if vllm is not None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    (folder / "agent.py").write_text(AGENT)
    (folder / "chaos.toml").write_text(CONFIG % (str(replay).lower(), steps, TORCH if vllm is None else VLLM % vllm))
    questions = [json.dumps({"question": f"What is {n} plus {n}?"}) for n in range(8)]
    (folder / "tasks.jsonl").write_text("\n".join(questions))
    process = _train(folder)
    for target in itertools.islice(itertools.cycle(targets), kills):
        deadline, calls = time.monotonic() + rng.uniform(2.0, 6.0), rng.randint(1, 5)
        while process.poll() is None and (
            time.monotonic() < deadline
            or not _targets(process.pid, target)
            or _query(folder, IN_FLIGHT) != [(calls,)]
            or (target == "host" and _query(folder, STRUCK) != [(0,)])
        ):
            time.sleep(0.02)
        if process.poll() is not None:
            break
        for victim in _targets(process.pid, target)[:1]:
            with suppress(psutil.Error):
                victim.kill()
                accounts.kills += 1
        if target == "trainer":
            process.wait()
            process = _train(folder)
        _print_progress(accounts)
    if process.wait(timeout=FINISH_TIMEOUT_S + 60 * kills) != 0:
        raise SystemExit(f"the training failed: see {folder / 'printed.log'}")
    lines = [json.loads(line) for line in (folder / "runs/chaos/metrics.jsonl").read_text().splitlines()]
    accounts.lost += steps - len({line["step"] for line in lines})
    accounts.twice += len(lines) - len({line["step"] for line in lines})
    accounts.lost += sum(int(6 - line.get("rollouts/succeeded", 0)) for line in lines)
    ((accounts.sampled, accounts.resampled, accounts.anew),) = _query(folder, RESAMPLED)
    for (rollout,) in _query(folder, FAILED):
        subprocess.run([sys.executable, "-m", "leyden", "show", "chaos", rollout], cwd=folder, stdout=sys.stderr)


def _query(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """Return what a query finds in the record of the training; nothing before there is one."""
    path = (folder / "runs/chaos/leyden.db").absolute().as_uri() + "?mode=ro"
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path, uri=True)) as database:
        return database.execute(query).fetchall()
    return []


def _train(folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "printed.log").open("ab") as printed:
        command = [sys.executable, "-m", "leyden", "train", "chaos.toml"]
        return subprocess.Popen(command, cwd=folder, stdout=printed, stderr=printed)


def _targets(trainer: int, target: str) -> list[psutil.Process]:
    modules = {
        "server": "leyden.server",
        "worker": "leyden.client.worker",
        "host": "leyden.client.host",
        "engine": "vllm.entrypoints",
    }
    with suppress(psutil.Error):
        process = psutil.Process(trainer)
        if target == "trainer":
            return [process]
        found = [one for one in process.children(recursive=True) if one.name() != guardian.NAME]
        if target == "engine" and not any(_runs(one, modules["host"]) for one in found):
            return []  # it has not served yet, and a first start that fails ends the run
        return [one for one in found if _runs(one, modules[target])]
    return []


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def count_left_behind(mark: str, timeout_s: float = 30.0) -> int:
    """Count processes that are left some time after everything was stopped."""
    deadline = time.monotonic() + timeout_s
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return len(left)


def _print_progress(accounts: Accounts) -> None:
    if accounts.kills % 20 == 0:
        print(f"{accounts.kills} faults", file=sys.stderr)


def run(
    folder: Path,
    faults: Sequence[str],
    training: int,
    seed: int,
    launcher: Path = LAUNCHER,
    vllm: str | None = None,
    replay: bool = True,
) -> Accounts:
    """Run both parts in a folder."""
    print(f"seed {seed}", file=sys.stderr)
    rng, accounts, mark = random.Random(seed), Accounts(), uuid4().hex
    os.environ[MARK] = mark
    try:
        if faults:
            (folder / "load").mkdir()
            asyncio.run(strike_under_load(folder / "load", faults, rng, accounts, launcher))
        if training:
            (folder / "training").mkdir()
            kill_in_training(folder / "training", training, rng, accounts, vllm, replay)
        accounts.left_behind = count_left_behind(mark)
    finally:
        del os.environ[MARK]
    return accounts


def main() -> None:
    """Run what the arguments ask for and print the accounts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60, help="faults under load")
    parser.add_argument("--training", type=int, default=12, help="kills in a training")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument(
        "--vllm",
        metavar="PYTHON",
        type=os.path.abspath,
        help="train with the vLLM of this interpreter, and kill it too",
    )
    parser.add_argument("--no-replay", action="store_true", help="sample again what was recorded before a kill")
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        faults = list(itertools.islice(itertools.cycle(FAULTS), options.faults))
        accounts = run(
            Path(folder), faults, options.training, options.seed, vllm=options.vllm, replay=not options.no_replay
        )
    wrong = accounts.lost + accounts.twice + accounts.left_behind
    ratio = round(1 - min(wrong, accounts.kills) / max(accounts.kills, 1), 4)
    result = {"ratio": ratio, **msgspec.structs.asdict(accounts), "seed": options.seed}
    in_training = "training_without_replay" if options.no_replay else "training"
    kept_as = "vllm" if options.vllm is not None else "benchmark" if options.faults else in_training
    report_result(result, options.out, kept_as)
    if accounts.lost or accounts.twice or accounts.left_behind:
        sys.exit(1)


if __name__ == "__main__":
    main()
