"""Test fixtures for workers: a real server whose model repeats the last number of its prompt, and worker processes."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from modelserving import END, ModelServer, eventually, model_server

from leyden.api.client import Remote
from leyden.api.wire import MAX_KEY_TTL_S, EventCursor, GroupSpec, RunSpec
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.process import WorkerProcess
from leyden.config.schema import RolloutConfig, WorkerConfig
from leyden.episodes import Episode
from leyden.outcomes import Ending
from leyden.process import guardian
from leyden.records import Purpose, RunSettings, Task
from leyden.server.control.keys import KeyKind

AGENTS = Path(__file__).parent / "agents"


def echo(prompt: str) -> str:
    """The completion of the model: the last number in the prompt."""
    return re.findall(r"number (-?\d+)", prompt)[-1] + END


def ending(episode: Episode) -> Ending | None:
    return episode.attempt.outcome.ending if episode.attempt.outcome else None


def message(episode: Episode) -> str:
    return episode.attempt.outcome.message if episode.attempt.outcome else ""


def in_sections(**keys: Any) -> dict[str, Any]:
    """Return options of a worker or of its isolation, with the keys of `rollout` and `workers` in their sections."""
    rollout = {name: keys.pop(name) for name in RolloutConfig.__struct_fields__ if name in keys}
    sized = ("processes", "concurrency")  # also options of a worker
    names = [name for name in WorkerConfig.__struct_fields__ if name in keys and name not in sized]
    workers = {name: keys.pop(name) for name in names}
    return {"rollout": RolloutConfig(**rollout), "workers": WorkerConfig(**workers), **keys}


class WorkerHarness:
    """A run `r` on a server: queues groups, starts workers and reads episodes."""

    def __init__(self, server: ModelServer, remote: Remote) -> None:
        self.server, self.remote = server, remote
        self._after = 0
        self._finished: set[str] = set()

    async def open(self, **settings: Any) -> None:
        """Create the run."""
        await self.remote.create_run(RunSpec("r", RunSettings(**settings)))

    async def queue(self, group: str, input: Any, size: int = 1) -> None:
        """Queue a group, named like its task."""
        await self.remote.enqueue("r", GroupSpec(group, Task(group, input), size, Purpose.TRAIN))

    async def episodes(self, group: str, timeout_s: float = 120.0) -> list[Episode]:
        """Wait until a group is finished and return its episodes."""
        async with asyncio.timeout(timeout_s):
            while group not in self._finished:
                log = await self.remote.follow_events("r", EventCursor(self._after, wait=30, kind="group.finished"))
                self._after = log.after
                self._finished |= {event.subject for event in log.events}
        return await self.remote.group_episodes("r", group)

    async def episode(self, group: str) -> Episode:
        """Wait for a group of one."""
        (episode,) = await self.episodes(group)
        return episode

    async def event(self, kind: str, subject: str, timeout_s: float = 120.0) -> None:
        """Wait for an event."""
        after = 0
        async with asyncio.timeout(timeout_s):
            while True:
                log = await self.remote.follow_events("r", EventCursor(after, wait=30, kind=kind))
                if any(event.subject == subject for event in log.events):
                    return
                after = log.after

    @contextmanager
    def worker(self, agent: str, kind: KeyKind = KeyKind.WORKER, **options: Any) -> Iterator[WorkerProcess]:
        """Run a worker process; on exit, kill it and check that none of its processes is left."""
        fields = {"server": self.server.url, "run": "r", "agent": agent, "base": str(AGENTS), "grace_s": 0.0, **options}
        scope = {} if kind is KeyKind.ADMIN else {"run": "r"}
        key = self.server.service.keyring.create(kind, MAX_KEY_TTL_S, **scope)[0]
        worker = WorkerProcess(WorkerOptions(**in_sections(**fields)), key)
        try:
            yield worker
        finally:
            descendants = (
                psutil.Process(worker.process.pid).children(recursive=True) if worker.process.poll() is None else []
            )
            worker.process.kill()
            worker.process.wait()
            deadline = time.monotonic() + 60
            while any(map(alive, descendants)):
                assert time.monotonic() < deadline, descendants
                time.sleep(0.02)


def hosts_of(worker: WorkerProcess) -> list[psutil.Process]:
    """The descendants of a worker except guardians."""
    descendants = psutil.Process(worker.process.pid).children(recursive=True)
    return [process for process in descendants if not is_guardian(process)]


def guardians_of(worker: WorkerProcess) -> list[psutil.Process]:
    """The guardians below a worker."""
    return [each for each in psutil.Process(worker.process.pid).children(recursive=True) if is_guardian(each)]


def is_guardian(process: psutil.Process) -> bool:
    """Whether it is the guardian of a host, a command or a service."""
    try:
        return process.name() == guardian.NAME
    except psutil.Error:
        return False


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def existing(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes with these numbers, without those that have ended."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


async def gone(processes: list[psutil.Process]) -> None:
    """Wait until none of these is left."""
    await eventually(lambda: not any(map(alive, processes)))


def kill(process: psutil.Process) -> None:
    """Send SIGKILL."""
    os.kill(process.pid, signal.SIGKILL)


@asynccontextmanager
async def worker_harness(home: Path) -> AsyncIterator[WorkerHarness]:
    """Start one."""
    async with model_server(home) as server:
        server.say = echo
        expiring = asyncio.create_task(server.service.store.expire_loop())
        async with Remote(server.url, server.service.keyring.create(KeyKind.ADMIN, MAX_KEY_TTL_S)[0]) as remote:
            yield WorkerHarness(server, remote)
        expiring.cancel()
