"""The worker: leases rollouts, runs them, renews their leases, scores them and reports how each ended.

It reports every attempt that it leases exactly once, whatever happens to the agent, the host process or the server,
except where the server itself has ended the attempt.
"""

import asyncio
import logging
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
from leyden.api.client import RemoteError
from leyden.api.retrying import RetryingRemote
from leyden.client.host_protocol import HostSetup
from leyden.client.isolation.options import IsolationOptions, ModeChoice
from leyden.client.isolation.running import Isolation, IsolationRequest, running_isolation
from leyden.client.processes.limits import memory_limit_mb
from leyden.client.rewards.attempt_scorer import AttemptScorer
from leyden.client.rewards.function import RetryPolicy, RewardFunction, load_reward
from leyden.client.rewards.group_scorer import GroupScorer
from leyden.client.runners.factory import RunnerFactory
from leyden.client.runners.supervisor import TimeLimits
from leyden.client.services.registry import ServiceRegistry
from leyden.client.worker.heartbeat import Heartbeat
from leyden.client.worker.lease_loop import LeaseLoop, LeaseLoopOptions
from leyden.client.worker.reporter import Reporter
from leyden.config.schema import ServiceConfig
from leyden.user_code.agent_reference import AgentKind, kind_of, read_command
from leyden.user_code.bridge import background_loop
from leyden.user_code.loading import LoadError

_log = logging.getLogger("leyden.worker")
_GIVE_BACK_TIMEOUT_S = 5.0
_PYTHON_PROBE = "import os, sys; import leyden.client.host.main; os.listdir(sys.argv[1])"
_COMMAND_PROBE = 'test -x "$0" || { echo "$0 cannot be run" >&2; exit 1; }; ls "$1" > /dev/null'
"""Run under the chosen isolation: an agent needs its program and its folder."""
_WITHDRAW_TIMEOUT_S, _WITHDRAW_INTERVAL_S = 2.0, 0.1


def _default_name() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100].lstrip("._-") or "worker"
    return f"{host}-{os.getpid()}"


class WorkerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a worker."""

    server: str
    agent: str
    """`module:name`, `path/to/file.py:name`, a pickled callable (`.pkl`), a command, or the URL of an endpoint."""
    run: str | None = None
    """None: any run that the key may serve."""
    reward: str | None = None
    base: str = "."
    """The folder that relative references start from."""
    path: tuple[str, ...] = ()
    """Folders to append to `sys.path`."""
    processes: int = defaults.WORKER_PROCESSES
    """Host processes for a Python agent."""
    concurrency: int = defaults.CONCURRENCY
    """Attempts at the same time, over all processes."""
    time_limit_s: float = defaults.TIME_LIMIT_S
    """How long one attempt may take."""
    memory_mb: int | None = None
    """Memory limit of a host or command with its processes; None: half of the machine's in a sandbox, else no limit."""
    cpu_s: float | None = None
    """CPU time limit of each process of a command; None: no limit."""
    grace_s: float = 10.0
    """How long attempts may continue after the worker was stopped; then they are given back."""
    drain_s: float = defaults.DRAIN_S
    """How long attempts may continue in a process where another exceeded its time limit and does not return."""
    unresponsive_s: float = 15.0
    """How long the event loop of a host process may be blocked before the process takes no new attempts."""
    reward_time_limit_s: float = defaults.REWARD_TIME_LIMIT_S
    """How long one call of the reward function may take."""
    reward_tries: int = defaults.REWARD_TRIES
    """How often the reward function is called where it fails."""
    services: dict[str, ServiceConfig] = {}
    """Started once by this worker, each used by one rollout at a time."""
    isolation: ModeChoice = "none"
    """How agents are isolated; `auto`: as strongly as it works here."""
    network: tuple[str, ...] = ()
    """`host:port` that sandboxes may reach besides the server; `*`: the network of the machine."""
    readable: tuple[str, ...] = ()
    """More folders that sandboxes show."""
    writable: tuple[str, ...] = ()
    """Folders that sandboxes may write to."""
    environment: tuple[str, ...] = ()
    """Names of variables that isolated agents inherit besides those that programs need; `*` stands for any text."""
    hidden: tuple[str, ...] = ()
    """Folders and files that sandboxes hide if they are inside of what they show."""
    name: str = msgspec.field(default_factory=_default_name)

    def __post_init__(self) -> None:
        if self.processes < 1 or self.concurrency < self.processes:
            raise ValueError("`processes` must be at least 1, and `concurrency` at least `processes`")
        for name in ("time_limit_s", "unresponsive_s", "memory_mb", "cpu_s", "reward_time_limit_s", "reward_tries"):
            if (limit := getattr(self, name)) is not None and limit <= 0:
                raise ValueError(f"`{name}` must be more than 0")


async def work(options: WorkerOptions, key: str, stop: asyncio.Event | None = None) -> None:
    """Work until `stop` is set. Raises `LoadError` before any lease where agent or reward cannot be loaded."""
    sys.path.extend(folder for folder in options.path if folder not in sys.path)
    try:
        reward = _load_reward(options)
        async with (
            RetryingRemote(options.server, key, _log.warning) as client,
            _services(options, reward) as services,
            running_isolation(isolation_request(options)) as isolation,
        ):
            await _work(options, client, reward, services, isolation, stop or asyncio.Event())
    except ExceptionGroup as group:
        raise _first_error(group) from None


async def _work(
    options: WorkerOptions,
    client: RetryingRemote,
    reward: RewardFunction | None,
    services: ServiceRegistry,
    isolation: Isolation,
    stop: asyncio.Event,
) -> None:
    heartbeat, reporter = Heartbeat(client, options.name), _reporter(client, reward, services)
    try:
        async with asyncio.TaskGroup() as tasks:
            lease_loops = [
                LeaseLoop(tasks, client, heartbeat, reporter, services, each)
                for each in _lease_loop_options(options, client, isolation)
            ]
            running = [tasks.create_task(loop.run()) for loop in lease_loops] + [tasks.create_task(heartbeat.run())]
            if reward is not None and reward.takes_group:
                scorer = GroupScorer(client, reward, services, options.name, options.run, options.concurrency)
                running.append(tasks.create_task(scorer.work()))
            await stop.wait()
            withdrawing = tasks.create_task(_withdraw(client, options.name))
            await asyncio.gather(*(loop.stop_leasing(_WITHDRAW_TIMEOUT_S) for loop in lease_loops))
            withdrawing.cancel()
            await heartbeat.wait_idle(options.grace_s)
            await _give_back(heartbeat, reporter)
            for task in running:
                task.cancel()
    finally:
        await _give_back(heartbeat, reporter)


def _reporter(client: RetryingRemote, reward: RewardFunction | None, services: ServiceRegistry) -> Reporter:
    if reward is None:
        return Reporter(client, None)
    if reward.takes_group:
        return Reporter(client, None, scored_as_group=True)
    return Reporter(client, AttemptScorer(client, reward, services))


async def _withdraw(client: RetryingRemote, worker: str) -> None:
    """Have the server answer the open lease requests, so that it grants none that is being cancelled.

    Repeated until cancelled, since a request may still be on its way to the server.
    """
    with suppress(RemoteError):
        while True:
            await client.limited(timeout_s=_WITHDRAW_TIMEOUT_S).withdraw(worker)
            await asyncio.sleep(_WITHDRAW_INTERVAL_S)


async def _give_back(heartbeat: Heartbeat, reporter: Reporter) -> None:
    """Give unfinished attempts back for other workers. If the server is down, their leases expire instead."""
    unfinished = heartbeat.tracked()
    for active in unfinished:
        active.abandon()
        heartbeat.untrack(active)
    with suppress(TimeoutError, RemoteError):
        async with asyncio.timeout(_GIVE_BACK_TIMEOUT_S):
            await asyncio.gather(*(reporter.give_back(active.lease) for active in unfinished))


def _lease_loop_options(options: WorkerOptions, client: RetryingRemote, isolation: Isolation) -> list[LeaseLoopOptions]:
    """Options of each lease loop: one per host process for a Python agent, one for any other agent."""
    kind = kind_of(options.agent, options.base)
    loops = options.processes if kind is AgentKind.PYTHON else 1
    all_options = []
    one_at_a_time = asyncio.Event()
    memory_mb = memory_limit_mb(options.memory_mb, isolation.options.mode)
    for index in range(loops):
        concurrency = _share(options.concurrency, index, loops)
        setup = HostSetup(
            agent=isolation.agent,
            base=str(Path(options.base).resolve()),
            path=options.path,
            server=isolation.server,
            key="",
            concurrency=concurrency,
            has_reward_function=options.reward is not None,
            memory_mb=memory_mb,
            cpu_s=options.cpu_s,
            isolation=replace(isolation.options, memory_mb=memory_mb),
            services={name: _service_share(name, each, index, loops) for name, each in options.services.items()},
        )
        all_options.append(
            LeaseLoopOptions(
                worker=options.name,
                run=options.run,
                concurrency=concurrency,
                limits=TimeLimits(options.time_limit_s, options.drain_s, options.unresponsive_s),
                start_runner=RunnerFactory(kind, setup, client, options.run).start,
                one_at_a_time=one_at_a_time,
            )
        )
    return all_options


def isolation_request(options: WorkerOptions) -> IsolationRequest:
    """Return what a worker's options say about isolation."""
    kind, base = kind_of(options.agent, options.base), str(Path(options.base).resolve())
    probe = [sys.executable, "-P", "-c", _PYTHON_PROBE, base]
    if kind is AgentKind.COMMAND:
        probe = ["/bin/sh", "-c", _COMMAND_PROBE, read_command(options.agent, base)[0], base]
    return IsolationRequest(
        choice="none" if kind is AgentKind.ENDPOINT else options.isolation,
        agent=options.agent,
        probe=tuple(probe),
        command_services=tuple(name for name, each in options.services.items() if each.command is not None),
        options=IsolationOptions(
            server=options.server.rstrip("/"),
            base=base,
            path=options.path,
            readable=options.readable,
            writable=options.writable,
            hidden=options.hidden,
            environment=options.environment,
            network=options.network,
        ),
    )


def _share(total: int, index: int, parts: int) -> int:
    """Return the size of one of `parts` nearly equal parts of `total`."""
    return total // parts + (index < total % parts)


def _service_share(name: str, service: ServiceConfig, index: int, loops: int) -> ServiceConfig:
    """Return a service for one lease loop. Python objects are created in each host, so their count is divided."""
    if service.make is None:
        return service
    if service.count < loops:
        raise LoadError(f"`services.{name}.count` is {service.count}, but each of {loops} processes needs at least one")
    return replace(service, count=_share(service.count, index, loops))


def _load_reward(options: WorkerOptions) -> RewardFunction | None:
    if options.reward is None:
        return None
    policy = RetryPolicy(options.reward_time_limit_s, options.reward_tries)
    return load_reward(options.reward, options.base, policy, tuple(options.services))


def _services(options: WorkerOptions, reward: RewardFunction | None) -> ServiceRegistry:
    """Return the services of the worker's process: all commands, and the objects that the reward function takes."""
    reward_services = reward.services if reward is not None else ()
    for_agent = [n for n, service in options.services.items() if service.make is not None and n not in reward_services]
    if for_agent and kind_of(options.agent, options.base) is not AgentKind.PYTHON:
        raise LoadError(
            f"service {for_agent[0]!r} is a Python object, and the agent does not run in Python: give it a `command`"
        )
    base = str(Path(options.base).resolve())
    objects = ServiceRegistry.objects(options.services, reward_services, base, loop=background_loop())
    return ServiceRegistry.commands(options.services, base) | objects


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group and the groups nested in it."""
    error = group.exceptions[0]
    return _first_error(error) if isinstance(error, ExceptionGroup) else error
