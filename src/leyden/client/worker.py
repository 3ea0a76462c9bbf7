"""The worker: leases rollouts, has them run, keeps them alive, scores them, and reports how each ended.

Every attempt that it leases it reports once, whatever the agent, a host or the server does meanwhile, unless the server
has said that the attempt is over.
"""

import asyncio
import os
import re
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from leyden.client.contact import Contact
from leyden.client.endpoint import Endpoint
from leyden.client.hosting import HostProcess
from leyden.client.jobs import Jobs
from leyden.client.kinds import Kind, kind_of
from leyden.client.lanes import Lane, Terms
from leyden.client.loading import load
from leyden.client.messages import Setup
from leyden.client.reporting import Reporter
from leyden.client.rewards import RewardFunction
from leyden.client.running import Runner
from leyden.remote import Remote
from leyden.wire import KeySpec

_GIVE_BACK_S = 5.0


def _name() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100].lstrip("._-") or "worker"
    return f"{host}-{os.getpid()}"


class WorkerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is told."""

    server: str
    agent: str
    """`module:name`, `path/to/file.py:name`, a pickled callable (`.pkl`), a command, or the URL of an endpoint."""
    run: str | None = None
    """None: any run that the key may serve."""
    reward: str | None = None
    base: str = "."
    """The folder that relative references start from."""
    path: tuple[str, ...] = ()
    """More folders in which modules are looked for."""
    hosts: int = 1
    concurrency: int = 16
    """Attempts at once, over all hosts."""
    time_limit_s: float = 600.0
    memory_mb: int | None = None
    cpu_s: float | None = None
    """What each process of a command may use; None: as much as there is."""
    grace_s: float = 10.0
    """How long attempts may go on when the worker is told to stop; then they are given back."""
    name: str = msgspec.field(default_factory=_name)

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.concurrency < self.hosts:
            raise ValueError("`hosts` is at least 1, and `concurrency` at least as large as `hosts`")
        for name in ("time_limit_s", "memory_mb", "cpu_s"):
            if (limit := getattr(self, name)) is not None and limit <= 0:
                raise ValueError(f"`{name}` is more than 0")


async def work(options: WorkerOptions, key: str, stop: asyncio.Event | None = None) -> None:
    """Work until `stop` is set. Raises `LoadError` where agent or reward cannot be loaded, before any lease."""
    sys.path.extend(folder for folder in options.path if folder not in sys.path)
    threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="reward")
    try:
        reward = _load_reward(options, threads)
        async with Remote(options.server, key) as remote:
            await _work(options, Contact(remote), reward, stop or asyncio.Event())
    except ExceptionGroup as group:
        raise _first(group) from None
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


async def _work(options: WorkerOptions, contact: Contact, reward: RewardFunction | None, stop: asyncio.Event) -> None:
    jobs, reporter = Jobs(contact, options.name), Reporter(contact, reward)
    async with asyncio.TaskGroup() as tasks:
        lanes = [Lane(tasks, contact, jobs, reporter, terms) for terms in _terms(options, contact)]
        lasting = [tasks.create_task(lane.work()) for lane in lanes] + [tasks.create_task(jobs.beat())]
        await stop.wait()
        for lane in lanes:
            lane.stop_leasing()
        if not await jobs.wait_idle(options.grace_s):
            await _give_back(jobs, reporter)
        for task in lasting:
            task.cancel()


async def _give_back(jobs: Jobs, reporter: Reporter) -> None:
    """What is not done by now is another worker's; where the server is away, its leases run out."""
    left = jobs.all()
    for job in left:
        job.abandon()
    with suppress(TimeoutError):
        async with asyncio.timeout(_GIVE_BACK_S):
            await asyncio.gather(*(reporter.give_back(job.lease) for job in left))


def _terms(options: WorkerOptions, contact: Contact) -> list[Terms]:
    """What each lane is told. The places are dealt out evenly; only Python agents need more than one process."""
    kind = kind_of(options.agent, options.base)
    lanes = options.hosts if kind is Kind.PYTHON else 1
    terms = []
    for number in range(lanes):
        places = options.concurrency // lanes + (number < options.concurrency % lanes)
        setup = Setup(
            agent=options.agent,
            base=str(Path(options.base).resolve()),
            path=options.path,
            server=options.server.rstrip("/"),
            key="",
            places=places,
            scored=options.reward is not None,
            memory_mb=options.memory_mb,
            cpu_s=options.cpu_s,
        )
        terms.append(
            Terms(
                worker=options.name,
                run=options.run,
                time_limit_s=options.time_limit_s,
                places=places,
                begin=partial(_begin, kind, setup, contact, options.run),
            )
        )
    return terms


async def _begin(kind: Kind, setup: Setup, contact: Contact, run: str | None) -> Runner:
    """Start what runs a lane's attempts. A host has a pool of its own, so its key speaks for its own attempts only."""
    match kind:
        case Kind.COMMAND:
            return await HostProcess.start("leyden.client.command", setup)
        case Kind.ENDPOINT:
            return Endpoint(setup)
        case Kind.PYTHON:
            pool = await contact.insist(lambda: contact.remote.make_key(KeySpec("pool", run)))
            return await HostProcess.start("leyden.client.host", replace(setup, key=pool.key), pool.pool)


def _load_reward(options: WorkerOptions, threads: ThreadPoolExecutor) -> RewardFunction | None:
    if options.reward is None:
        return None
    with _stand_in_keys():
        function = load(options.reward, options.base)
    return RewardFunction(function, options.reward, threads, options.time_limit_s)


@contextmanager
def _stand_in_keys() -> Iterator[None]:
    """A reward often lives beside its agent, whose clients want a key when they are made; here none is used."""
    missing = [name for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY") if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "no-key-in-the-worker"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """What went wrong first, out of the groups that it went through."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
