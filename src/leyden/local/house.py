"""Everything on this machine: a server with the model in it, and workers beside it, for as long as somebody trains.

The engine shares its weights with the trainer, so they live in one process with the server; agents run in processes of
their own, which end with this one however it ends.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from transformers import PreTrainedModel

from leyden.config import Config
from leyden.config.schema import UPSTREAM_KEY_VARIABLE
from leyden.engine.torch_engine import TorchEngine
from leyden.local.workers import Workers, worker_options, working
from leyden.records import RunSettings, Sampling
from leyden.remote import Remote
from leyden.server.gateway.admission import Admission
from leyden.server.gateway.chatml import renderer_for
from leyden.server.gateway.gateway import Gateway
from leyden.server.gateway.policy import Policy as Served
from leyden.server.gateway.tokenizer import Tokenizer
from leyden.server.gateway.upstream import Upstream
from leyden.server.keys import write_private
from leyden.server.options import ServeOptions
from leyden.server.serve import serving
from leyden.server.service import Service
from leyden.trainer.loop import POLICY
from leyden.wire import KeySpec, RunSpec

T = TypeVar("T")


class House(Struct, frozen=True):
    """What runs."""

    remote: Remote
    engine: TorchEngine
    url: str
    """Where workers elsewhere reach it."""
    workers: Workers | None
    """None where the configuration wants none here."""

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something that needs the workers, for as long as there are some."""
        task = asyncio.create_task(work)
        failing = asyncio.create_task(self.workers.failed()) if self.workers is not None else None
        try:
            await asyncio.wait({task, failing} if failing else {task}, return_when=asyncio.FIRST_COMPLETED)
            if failing is not None and failing.done() and not task.done():
                raise failing.exception() or AssertionError("workers fail with an error")
            return task.result()
        finally:
            for one in filter(None, (task, failing)):
                one.cancel()
            await asyncio.gather(*filter(None, (task, failing)), return_exceptions=True)


@asynccontextmanager
async def house(
    config: Config, folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, version: int, run: str
) -> AsyncIterator[House]:
    """Serve a model to the agents of a run."""
    alone = config.deterministic
    engine = TorchEngine(model, slots=1 if alone else config.engine.slots, version=version, reuse=not alone)
    service: list[Service] = []

    def attach(found: Service) -> None:
        served = Served(POLICY, engine, renderer_for(tokenizer), tokenizer, Admission(at_once=config.engine.slots))
        found.gateway = Gateway(found.store, {POLICY: served}, _upstream(config))
        service.append(found)

    options = ServeOptions(folder, config.server.host, config.server.port, advertise=config.server.advertise)
    engine.start()
    try:
        async with serving(options, attach) as server:
            if config.workers.hosts:
                await service[0].store.release("the process that ran it is gone")
            async with Remote(server.running.url, admin_key(folder)) as remote:
                await _make_run(remote, config, run)
                key = (await remote.make_key(KeySpec("worker", run))).key
                if not config.workers.hosts:
                    write_private(folder / "worker.key", key)
                    yield House(remote, engine, server.running.advertised, None)
                    return
                told = worker_options(config, server.running.url, run)
                async with working(told, key, folder / "worker.log") as workers:
                    yield House(remote, engine, server.running.advertised, workers)
    finally:
        engine.close()


def _upstream(config: Config) -> Upstream | None:
    """Whatever serves the model names that are routed there."""
    if config.upstream.url is None:
        return None
    return Upstream(config.upstream.url, os.environ.get(UPSTREAM_KEY_VARIABLE), config.upstream.timeout_s)


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
        sampling=Sampling(temperature=sampling.temperature, max_tokens=sampling.max_tokens, seed=config.seed),
        max_calls=rollout.max_calls,
        max_tokens=rollout.max_tokens,
        history=rollout.history,
        agent_rewards=rollout.agent_rewards,
        routes=config.routes,
        roles=config.roles,
    )
    known = {summary.id for summary in await remote.runs()}
    if run not in known:
        await remote.create_run(RunSpec(run, settings, msgspec.to_builtins(config)))
