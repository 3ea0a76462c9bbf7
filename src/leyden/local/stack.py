"""Starts engine, server and worker of a run on this machine, and stops them.

The embedded engine runs in this process, unless it has one of its own. Server and worker are child processes, which end
with this one, however that ends.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from leyden.api.client import Remote, RetryingRemote, RetryLimits, read_key
from leyden.api.wire import MAX_KEY_TTL_S, KeySpec, RunSpec
from leyden.background import running, start_background
from leyden.client.isolation.running import choose_mode
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.worker import isolation_request
from leyden.config import Config
from leyden.config.policies import policy_routes, role_routes
from leyden.config.schema import ServerConfig
from leyden.engine.protocol import EngineBackend, ServedEngine
from leyden.learner.loading import model_device
from leyden.local.engines import running_engines
from leyden.local.notes import print_note, stderr_console
from leyden.local.policies import LocalPolicy, served_policy
from leyden.local.server_process import LocalServer
from leyden.local.worker_process import LocalWorker, worker_options
from leyden.orchestrator.disk_room import watch_room
from leyden.orchestrator.report.progress_line import ProgressLine
from leyden.process.resources import usable_cores
from leyden.records import RunSettings, Sampling
from leyden.server.control.keys import write_private
from leyden.server.options import ServedPolicy, ServeOptions, ServerProcessOptions

if TYPE_CHECKING:
    from leyden.local.cluster import RayCluster

T = TypeVar("T")
_TRAINER_RETRIES = RetryLimits(timeout_s=None, max_backoff_s=2.0, silent_failures=5, max_errors=30)
"""A server that is started again answers in time to need no report. One that fails for about a minute will not stop."""


class SupervisedPart(Protocol):
    """A part of a run that is restarted when it fails, within limits."""

    async def wait_failed(self) -> NoReturn:
        """Wait until it has failed for good, and raise the reason."""


async def run_with(parts: Iterable[SupervisedPart], work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that needs some parts; raises the error of a part that fails."""
    async with running(work, *(part.wait_failed() for part in parts)) as tasks:
        task, *failures = tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.exception() is not None:
            for failure in failures:
                if failure.done():
                    failure.result()
        return task.result()


class LocalStack(Struct, frozen=True):
    """The running parts of a local run."""

    remote: Remote
    engines: Mapping[str, EngineBackend]
    """By policy."""
    server: LocalServer
    worker: SupervisedPart | None
    """None if `workers.processes` is 0."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that needs engines, server and worker; raises their error when one of them fails."""
        parts = (*self.engines.values(), self.server, self.worker)
        return await run_with((part for part in parts if part is not None), work)


@asynccontextmanager
async def local_stack(
    config: Config, folder: Path, policies: Sequence[LocalPolicy], run: str, cluster: "RayCluster | None" = None
) -> AsyncIterator[LocalStack]:
    """Serve policies to the agents of a run, within this context; engines and workers may be on a cluster."""
    park = run if any(one.is_trained for one in policies) else None
    elsewhere = () if cluster is None else [one.find for one in cluster.engines]
    async with running_engines(folder, policies, elsewhere) as engines:
        served = [served_policy(one, engines[one.name]) for one in policies]
        on_gpu = model_device(policies[0].model).type == "cuda"
        started = server_and_worker(config, folder, served, engines, run, park, on_gpu, cluster)
        async with started as (remote, server, worker):
            yield LocalStack(remote, engines, server, worker)


@asynccontextmanager
async def server_and_worker(
    config: Config,
    folder: Path,
    served: Sequence[ServedPolicy],
    engines: Mapping[str, ServedEngine],
    run: str,
    park: str | None = None,
    on_gpu: bool = False,
    cluster: "RayCluster | None" = None,
) -> AsyncIterator[tuple[Remote, LocalServer, SupervisedPart | None]]:
    """Run the server and the worker of a run whose engines run, within this context; yield a client with them.

    On a cluster there are several workers, and the server listens at the address that its nodes reach.
    """
    if cluster is not None and config.server.host == ServerConfig().host:
        config = replace(config, server=replace(config.server, host=cluster.address))
    async with (
        _shown_server(_server_options(config, folder, served, park), engines, folder / "server.log") as server,
        trainer_remote(server, folder) as remote,
        _watched_disk(folder),
    ):
        await _create_run(remote, config, run)
        key = (await remote.create_key(KeySpec("worker", run, MAX_KEY_TTL_S))).key
        if config.workers.processes == 0:
            write_private(folder / "worker.key", key)
            yield remote, server, None
            return
        options = worker_options(config, server.running.url, run, on_gpu)
        if cluster is not None:
            async with cluster.workers(replace(options, server=server.running.advertised), key, folder) as workers:
                yield remote, server, workers
            return
        options = await _choose_isolation(options)
        _print_worker(options)
        async with LocalWorker(options, key, folder / "worker.log") as worker:
            yield remote, server, worker


@asynccontextmanager
async def _watched_disk(folder: Path) -> AsyncIterator[None]:
    """Within this context, print when the disk of a folder is full."""
    watch = start_background(watch_room(folder, print_note), "the watch over the disk")
    try:
        yield
    finally:
        watch.cancel()


@asynccontextmanager
async def _shown_server(
    options: ServerProcessOptions, engines: Mapping[str, ServedEngine], log: Path
) -> AsyncIterator[LocalServer]:
    """Run a server within this context; on a terminal, show that it is starting."""
    with ProgressLine(stderr_console()) as line:
        line.show("starting the server")
        async with LocalServer(options, engines, log) as server:
            line.close()
            yield server


async def _choose_isolation(options: WorkerOptions) -> WorkerOptions:
    """Resolve `auto` here, where its choice can be printed."""
    if options.workers.isolation != "auto":
        return options
    mode, note = await asyncio.to_thread(choose_mode, isolation_request(options))
    print_note(note)
    return replace(options, workers=replace(options.workers, isolation=mode))


def _print_worker(options: WorkerOptions) -> None:
    processes = "1 process" if options.processes == 1 else f"{options.processes} processes"
    rollouts = "1 rollout" if options.concurrency == 1 else f"{options.concurrency} rollouts"
    print_note(f"agents: {processes} on {usable_cores()} cores, up to {rollouts} at once")


def _server_options(
    config: Config, folder: Path, served: Sequence[ServedPolicy], park: str | None
) -> ServerProcessOptions:
    return ServerProcessOptions(
        serve=ServeOptions(folder, config.server, config.upstream, beside=folder.parent),
        policies=tuple(served),
        release=config.workers.processes != 0,
        park=park,
    )


def admin_key(folder: Path) -> str:
    """Read the admin key that a server writes into its home folder."""
    return read_key(folder / "admin.key")


def trainer_remote(server: LocalServer, folder: Path) -> RetryingRemote:
    """Return the client of a trainer: it waits for a server that is started again, unless that has failed for good."""
    return RetryingRemote(server.running.url, admin_key(folder), print_note, _TRAINER_RETRIES, lambda: server.is_gone)


async def _create_run(remote: Remote, config: Config, run: str) -> None:
    """Create the run; a resumed one keeps the settings of its start."""
    if not (await remote.run_exists(run)).exists:
        await remote.create_run(run_spec(config, run))


def run_spec(config: Config, run: str) -> RunSpec:
    """Return the request of a run with a configuration."""
    return RunSpec(run, run_settings(config), msgspec.to_builtins(config))


def run_settings(config: Config) -> RunSettings:
    """Return the settings of a run that the server applies; they have the names of the configuration's keys."""
    tokens = config.sampling.max_tokens
    by_step = tokens if isinstance(tokens, dict) else None
    sampling = config.sampling if by_step is None else replace(config.sampling, max_tokens=None)
    return replace(
        msgspec.convert(config.rollout, RunSettings, from_attributes=True),
        sampling=replace(msgspec.convert(sampling, Sampling, from_attributes=True), seed=config.seed),
        completion_tokens=by_step,
        reward_function=config.reward is not None,
        allow_biased_sampling=config.training.allow_biased_sampling,
        routes=policy_routes(config),
        roles=config.roles,
        role_routes=role_routes(config),
    )
