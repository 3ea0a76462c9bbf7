"""The worker: leases rollouts, runs them, renews their leases, scores them and reports how each ended.

It reports every attempt that it leases exactly once, whatever happens to the agent, the host process or the server,
except if the server itself has ended the attempt.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from leyden.api.client import RemoteError, RetryingRemote
from leyden.api.wire import FinishRequest
from leyden.background import wait_set
from leyden.client.host_protocol import HostSetup
from leyden.client.isolation.options import IsolationOptions
from leyden.client.isolation.running import Isolation, IsolationRequest, running_isolation
from leyden.client.rewards.function import RewardFunction, load_reward
from leyden.client.rewards.group_scorer import GroupScorer
from leyden.client.runners.factory import RunnerFactory
from leyden.client.services.registry import ServiceRegistry
from leyden.client.worker.heartbeat import Heartbeat
from leyden.client.worker.lease_loop import LeaseLoop, LeaseLoopOptions
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.reporter import Reporter
from leyden.config.schema import ServiceConfig
from leyden.process.usage import UseReports
from leyden.user_code.bridge import background_loop
from leyden.user_code.loading import AgentKind, LoadError, kind_of, read_command

_log = logging.getLogger("leyden.worker")
_GIVE_BACK_TIMEOUT_S = 5.0
_PATIENCE_S = 60.0
"""How long a worker waits for its first rollout before it says so."""
_PYTHON_PROBE = "import os, sys; import leyden.client.host.main; os.listdir(sys.argv[1])"
_COMMAND_PROBE = 'test -x "$0" || { echo "$0 cannot be run" >&2; exit 1; }; ls "$1" > /dev/null'
"""Run under the chosen isolation: an agent needs its program and its folder."""
_WITHDRAW_TIMEOUT_S, _WITHDRAW_INTERVAL_S = 2.0, 0.1


async def work(
    options: WorkerOptions,
    key: str,
    stop: asyncio.Event | None = None,
    on_end: Callable[[FinishRequest], None] = lambda _: None,
) -> None:
    """Work until `stop` is set or the run is done; `on_end` is called for each attempt that was reported.

    Raises `LoadError` before any lease for options with which it cannot work.
    """
    sys.path.extend(folder for folder in options.path if folder not in sys.path)
    try:
        reward = _load_reward(options)
        async with (
            RetryingRemote(options.server, key, _log.warning) as client,
            _services(options, reward) as services,
            running_isolation(isolation_request(options)) as isolation,
        ):
            reporter = Reporter(client, reward, services, on_end)
            await _work(options, client, reward, reporter, services, isolation, stop or asyncio.Event())
    except ExceptionGroup as group:
        first = _first_error(group)
        if not (isinstance(first, RemoteError) and first.is_end_of_run):
            raise first from None


async def _work(
    options: WorkerOptions,
    client: RetryingRemote,
    reward: RewardFunction | None,
    reporter: Reporter,
    services: ServiceRegistry,
    isolation: Isolation,
    stop: asyncio.Event,
) -> None:
    heartbeat, use_reports = Heartbeat(client, options.name), UseReports()
    try:
        async with asyncio.TaskGroup() as tasks:
            lease_loops = [
                LeaseLoop(tasks, client, heartbeat, reporter, services, each)
                for each in _lease_loop_options(options, client, isolation, use_reports)
            ]
            running = [tasks.create_task(loop.run()) for loop in lease_loops]
            running += [tasks.create_task(heartbeat.run()), tasks.create_task(use_reports.run())]
            running.append(tasks.create_task(_say_if_nothing_comes(heartbeat, options.run)))
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


async def _say_if_nothing_comes(heartbeat: Heartbeat, run: str | None) -> None:
    """Say once that there is nothing to do: a run that nobody trains asks for no rollouts."""
    if not await wait_set(heartbeat.any_tracked, _PATIENCE_S):
        asked = "no run asks" if run is None else f"run {run} does not ask"
        _log.warning("nothing to do for %.0f s: %s for rollouts yet; is it being trained?", _PATIENCE_S, asked)


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


def _lease_loop_options(
    options: WorkerOptions, client: RetryingRemote, isolation: Isolation, use_reports: UseReports
) -> list[LeaseLoopOptions]:
    """Options of each lease loop: one per host process for a Python agent, one for any other agent."""
    kind = kind_of(options.agent, options.base)
    loops = options.processes if kind is AgentKind.PYTHON else 1
    all_options = []
    one_at_a_time = asyncio.Event()
    if options.rollout.fixed_seeds and kind is AgentKind.PYTHON:  # the generators belong to the process
        one_at_a_time.set()
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
            isolation=isolation.options,
            services={name: _service_share(name, each, index, loops) for name, each in options.services.items()},
        )
        all_options.append(
            LeaseLoopOptions(
                worker=options,
                concurrency=concurrency,
                start_runner=RunnerFactory(kind, setup, client, options.run).start,
                one_at_a_time=one_at_a_time,
                use_reports=use_reports,
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
        choice="none" if kind is AgentKind.ENDPOINT else options.workers.isolation,
        agent=options.agent,
        probe=tuple(probe),
        command_services=tuple(name for name, each in options.services.items() if each.command is not None),
        options=IsolationOptions(
            server=options.server.rstrip("/"),
            base=base,
            path=options.path,
            rollout=options.rollout,
            workers=options.workers,
            hidden=options.hidden,
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
    return load_reward(options.reward, options.base, options.rollout, tuple(options.services))


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
