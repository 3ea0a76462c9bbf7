"""The worker: leases rollouts, has them run, keeps them alive, scores them, and reports how each ended.

Every attempt that it leases it reports once, whatever the agent, a host or the server does meanwhile, unless the server
has said that the attempt is over.
"""

import asyncio
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from leyden import defaults
from leyden.client.agent_reference import AgentKind, kind_of
from leyden.client.host_protocol import HostSetup
from leyden.client.processes.orphan_reaper import OrphanReaper
from leyden.client.retrying_client import RetryingClient
from leyden.client.rewards.function import RetryPolicy, RewardFunction, load_reward
from leyden.client.rewards.group_scorer import GroupScorer
from leyden.client.runners.factory import RunnerFactory
from leyden.client.runners.supervisor import TimeLimits
from leyden.client.services.registry import ServiceRegistry
from leyden.client.user_code import loop_apart
from leyden.client.worker.heartbeat import Heartbeat
from leyden.client.worker.lease_loop import LeaseLoop, LeaseLoopOptions
from leyden.client.worker.reporter import Reporter
from leyden.config.schema import ServiceConfig
from leyden.loading import LoadError
from leyden.remote import Remote, RemoteError

_GIVE_BACK_S, _WITHDRAW_S, _AGAIN_S = 5.0, 2.0, 0.1


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
    processes: int = defaults.WORKER_PROCESSES
    concurrency: int = defaults.CONCURRENCY
    """Attempts at once, over all processes."""
    time_limit_s: float = defaults.TIME_LIMIT_S
    memory_mb: int | None = None
    cpu_s: float | None = None
    """What each process of a command may use; None: as much as there is."""
    grace_s: float = 10.0
    """How long attempts may go on when the worker is told to stop; then they are given back."""
    drain_s: float = defaults.DRAIN_S
    """How long attempts may go on in a process where another has outlived its time limit and does not return."""
    deaf_s: float = 15.0
    """How long an agent may block the event loop of its process; a process that is blocked longer takes no new work."""
    reward_time_limit_s: float = defaults.REWARD_TIME_LIMIT_S
    reward_tries: int = defaults.REWARD_TRIES
    """How long one call of the reward function may take, and how many there are where it fails."""
    services: dict[str, ServiceConfig] = {}
    """What this worker starts once and lends to one rollout at a time."""
    name: str = msgspec.field(default_factory=_name)

    def __post_init__(self) -> None:
        if self.processes < 1 or self.concurrency < self.processes:
            raise ValueError("`processes` must be at least 1, and `concurrency` at least `processes`")
        for name in ("time_limit_s", "deaf_s", "memory_mb", "cpu_s", "reward_time_limit_s", "reward_tries"):
            if (limit := getattr(self, name)) is not None and limit <= 0:
                raise ValueError(f"`{name}` is more than 0")


async def work(options: WorkerOptions, key: str, stop: asyncio.Event | None = None) -> None:
    """Work until `stop` is set. Raises `LoadError` where agent or reward cannot be loaded, before any lease."""
    sys.path.extend(folder for folder in options.path if folder not in sys.path)
    try:
        reward = _load_reward(options)
        async with Remote(options.server, key) as remote, _services(options, reward) as services:
            await _work(options, RetryingClient(remote), reward, services, stop or asyncio.Event())
    except ExceptionGroup as group:
        raise _first(group) from None


async def _work(
    options: WorkerOptions,
    contact: RetryingClient,
    reward: RewardFunction | None,
    services: ServiceRegistry,
    stop: asyncio.Event,
) -> None:
    jobs, reporter = Heartbeat(contact, options.name), Reporter(contact, reward, services)
    warden = OrphanReaper()
    try:
        async with asyncio.TaskGroup() as tasks:
            terms = _terms(options, contact, warden.mark)
            lanes = [LeaseLoop(tasks, contact, jobs, reporter, services, each) for each in terms]
            lasting = [tasks.create_task(lane.work()) for lane in lanes] + [tasks.create_task(jobs.beat())]
            if reward is not None and reward.takes_group:
                scorer = GroupScorer(contact, reward, services, options.name, options.run, options.concurrency)
                lasting.append(tasks.create_task(scorer.work()))
            await stop.wait()
            withdrawing = tasks.create_task(_withdraw(contact, options.name))
            await asyncio.gather(*(lane.stop_leasing(_WITHDRAW_S) for lane in lanes))
            withdrawing.cancel()
            await jobs.wait_idle(options.grace_s)
            await _give_back(jobs, reporter)
            for task in lasting:
                task.cancel()
    finally:
        await _give_back(jobs, reporter)
        await asyncio.to_thread(warden.close)


async def _withdraw(contact: RetryingClient, worker: str) -> None:
    """Have the server answer what the lanes have asked for: it may grant a request that is just being broken off.

    Again and again, since a request may be on its way yet.
    """
    with suppress(RemoteError):
        while True:
            await contact.insist(lambda: contact.remote.withdraw(worker), within_s=_WITHDRAW_S)
            await asyncio.sleep(_AGAIN_S)


async def _give_back(jobs: Heartbeat, reporter: Reporter) -> None:
    """What is not done by now is another worker's; where the server is away, its leases run out."""
    left = jobs.all()
    for job in left:
        job.abandon()
        jobs.remove(job)
    with suppress(TimeoutError, RemoteError):
        async with asyncio.timeout(_GIVE_BACK_S):
            await asyncio.gather(*(reporter.give_back(job.lease) for job in left))


def _terms(options: WorkerOptions, contact: RetryingClient, mark: str) -> list[LeaseLoopOptions]:
    """What each lane is told. The places are dealt out evenly; only Python agents need more than one process."""
    kind = kind_of(options.agent, options.base)
    lanes = options.processes if kind is AgentKind.PYTHON else 1
    terms = []
    for number in range(lanes):
        places = options.concurrency // lanes + (number < options.concurrency % lanes)
        setup = HostSetup(
            agent=options.agent,
            base=str(Path(options.base).resolve()),
            path=options.path,
            server=options.server.rstrip("/"),
            key="",
            places=places,
            scored=options.reward is not None,
            memory_mb=options.memory_mb,
            cpu_s=options.cpu_s,
            services={name: _share(name, config, number, lanes) for name, config in options.services.items()},
            mark=mark,
        )
        terms.append(
            LeaseLoopOptions(
                worker=options.name,
                run=options.run,
                places=places,
                limits=TimeLimits(options.time_limit_s, options.drain_s, options.deaf_s),
                begin=RunnerFactory(kind, setup, contact, options.run).begin,
            )
        )
    return terms


def _share(name: str, service: ServiceConfig, number: int, lanes: int) -> ServiceConfig:
    """A service as one lane has it: what its process makes itself is dealt out over the lanes."""
    if service.make is None:
        return service
    if service.count < lanes:
        raise LoadError(f"`services.{name}.count` is {service.count}, and each of {lanes} processes needs at least one")
    return replace(service, count=service.count // lanes + (number < service.count % lanes))


def _load_reward(options: WorkerOptions) -> RewardFunction | None:
    if options.reward is None:
        return None
    patience = RetryPolicy(options.reward_time_limit_s, options.reward_tries)
    return load_reward(options.reward, options.base, patience, tuple(options.services))


def _services(options: WorkerOptions, reward: RewardFunction | None) -> ServiceRegistry:
    """Those of the worker: all commands, and what the reward function asks for."""
    asked = reward.services if reward is not None else ()
    made = [name for name, service in options.services.items() if service.make is not None and name not in asked]
    if made and kind_of(options.agent, options.base) is not AgentKind.PYTHON:
        raise LoadError(f"service {made[0]!r} is made in Python, which the agent is not: give it a `command`")
    base = str(Path(options.base).resolve())
    made_here = ServiceRegistry.objects(options.services, asked, base, loop=loop_apart())
    return ServiceRegistry.commands(options.services, base) | made_here


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """What went wrong first, out of the groups that it went through."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
