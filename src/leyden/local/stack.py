"""Everything on this machine: a model, a server beside it, and workers, for as long as somebody trains.

The engine shares its weights with the trainer, so they live in one process. The server and the agents have processes of
their own, which end with this one however it ends.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from transformers import PreTrainedModel

from leyden.config import Config
from leyden.engine.protocol import EngineBackend
from leyden.local.engine import running_engine
from leyden.local.server_process import LocalServer, server_beside
from leyden.local.worker_process import LocalWorker, worker_options, working
from leyden.records import DEFAULT_POLICY, RunSettings, Sampling
from leyden.remote import Remote
from leyden.server.keys import write_private
from leyden.server.options import ServeOptions, ServerProcessOptions
from leyden.trainer.policy.loading import ModelSource
from leyden.wire import KeySpec, RunSpec

T = TypeVar("T")
_MOMENT_S = 2.0
"""So long after its last answer a server has ended."""


class LocalStack(Struct, frozen=True):
    """What runs."""

    remote: Remote
    engine: EngineBackend
    server: LocalServer
    workers: LocalWorker | None
    """None where the configuration wants none here."""

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something that needs the server and the workers, for as long as they are there."""
        task = asyncio.create_task(work)
        needed = [asyncio.create_task(one.failed()) for one in (self.server, self.workers) if one is not None]
        try:
            await asyncio.wait({task, *needed}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), OSError):
                await asyncio.wait(needed, timeout=_MOMENT_S, return_when=asyncio.FIRST_COMPLETED)  # which is why
            if not task.done() or task.exception() is not None:
                for failing in needed:
                    if failing.done():
                        failing.result()
            return task.result()
        finally:
            for one in (task, *needed):
                one.cancel()
            await asyncio.gather(task, *needed, return_exceptions=True)


@asynccontextmanager
async def local_stack(
    config: Config, folder: Path, model: PreTrainedModel, source: ModelSource, version: int, run: str
) -> AsyncIterator[LocalStack]:
    """Serve a model to the agents of a run."""
    async with (
        running_engine(config, model, source, version) as engine,
        server_beside(_server_options(config, folder, source, engine), engine, folder / "server.log") as server,
        Remote(server.running.url, admin_key(folder)) as remote,
    ):
        await _make_run(remote, config, run)
        key = (await remote.make_key(KeySpec("worker", run))).key
        if not config.workers.processes:
            write_private(folder / "worker.key", key)
            yield LocalStack(remote, engine, server, None)
            return
        options = worker_options(config, server.running.url, run)
        async with working(options, key, folder / "worker.log") as workers:
            yield LocalStack(remote, engine, server, workers)


def _server_options(config: Config, folder: Path, source: ModelSource, engine: EngineBackend) -> ServerProcessOptions:
    server, upstream = config.server, config.upstream
    return ServerProcessOptions(
        serve=ServeOptions(
            home=folder,
            host=server.host,
            port=server.port,
            advertise=server.advertise,
            upstream=upstream.url,
            upstream_timeout_s=upstream.timeout_s,
        ),
        policy=DEFAULT_POLICY,
        model=str(source.folder),
        name=source.name,
        engine=engine.address,
        release=config.workers.processes > 0,
    )


def admin_key(folder: Path) -> str:
    """The key that a server left in its home folder."""
    return (folder / "admin.key").read_text().strip()


async def _make_run(remote: Remote, config: Config, run: str) -> None:
    """Create the run; one that goes on keeps the settings that it began with."""
    rollout, sampling = config.rollout, config.sampling
    settings = RunSettings(
        lease_s=rollout.lease_s,
        max_attempts=rollout.max_attempts,
        failure_reward=rollout.failure_reward,
        sampling=Sampling(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=config.seed,
        ),
        max_calls=rollout.max_calls,
        max_tokens=rollout.max_tokens,
        history=rollout.history,
        agent_rewards=rollout.agent_rewards,
        allow_biased_sampling=config.training.allow_biased_sampling,
        routes=config.routes,
        roles=config.roles,
    )
    known = {summary.id for summary in await remote.runs()}
    if run not in known:
        await remote.create_run(RunSpec(run, settings, msgspec.to_builtins(config)))
