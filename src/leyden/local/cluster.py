"""Runs the ranks, engines and workers of a run on the nodes of a Ray cluster. Server and dashboard stay here.

Ray reserves what ranks and engines need, in placement groups, and starts a host on the node of each
(`leyden.process.host`), by which this process starts them. If a node is lost, Ray moves what was reserved there.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from msgspec.structs import replace

from leyden.background import running
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.ray_cluster import RayWorkers
from leyden.config import Config, ConfigError
from leyden.local.cluster_plan import Bundle, describe, plan_cluster
from leyden.local.notes import print_note
from leyden.models.source import find_model
from leyden.process.place import Place, PlaceLost, RemotePlace
from leyden.process.ray_cluster import ClusterError, LeydenHost, node_of, one_line

_PATIENCE_S = 10.0
"""How long the cluster may take to place a process before the user is told."""
_TRIES, _RETRY_S = 30, 2.0
_CLOSE_TIMEOUT_S = 5.0
_WORKER_CPUS = 1


class Reservation:
    """What is reserved for one process that may be started several times."""

    def __init__(self, ray: Any, group: Any, index: int, name: str, paths: dict[str, Path]) -> None:
        """A node must see some `paths`, by the settings that they come from."""
        self._ray, self._group, self._index, self._name, self._paths = ray, group, index, name, paths
        self._actor: Any = None

    async def find(self) -> Place:
        """Return where the process is to be started; wait until the cluster has room for it."""
        for _ in range(_TRIES):
            try:
                place = await self._opened()
                await self._check(place)
                return place
            except (self._ray.exceptions.RayError, PlaceLost) as error:
                last = error
                self._drop()
            await asyncio.sleep(_RETRY_S)
        raise ClusterError(f"{self._name} cannot be started on the cluster: {one_line(last)}")

    async def close(self) -> None:
        """Give the node back."""
        if self._actor is not None:
            with suppress(TimeoutError, self._ray.exceptions.RayError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._actor.close.remote()
            self._drop()

    async def _opened(self) -> RemotePlace:
        if self._actor is None:
            self._actor = self._start()
        opening = asyncio.ensure_future(self._actor.open.remote())
        try:
            if not (await asyncio.wait((opening,), timeout=_PATIENCE_S))[0]:
                needed = describe(self._group.bundle_specs[self._index])
                print_note(f"{self._name} waits for a node of the cluster that has {needed} free")
            place: RemotePlace = await opening
        finally:
            opening.cancel()
        return place

    def _start(self) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle: Bundle = self._group.bundle_specs[self._index]
        return (
            self._ray.remote(LeydenHost)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._index),
            )
            .remote()
        )

    def _drop(self) -> None:
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None

    async def _check(self, place: RemotePlace) -> None:
        missing = await place.missing(list(self._paths.values()))
        for setting, path in self._paths.items():
            if str(path) in missing:
                raise ConfigError(
                    f"`{setting}`: {place.name} does not see {path}, which {self._name} needs: name a folder that all "
                    "nodes share, at one path"
                )


class RayCluster:
    """What a run has of a cluster."""

    def __init__(self, ray: Any, config: Config) -> None:
        """Raises `ConfigError` if the nodes cannot run this."""
        self._ray, self._config = ray, config
        self.address: str = ray.util.get_node_ip_address()
        """That of this machine, as the nodes reach it."""
        nodes = {str(node_of(one)): one["Resources"] for one in ray.nodes() if one["Alive"]}
        self._plan = plan_cluster(config, nodes, torch.cuda.is_available())
        self._ranks: list[Reservation] = []
        self.engines: list[Reservation] = []

    @asynccontextmanager
    async def reserved(self, run: Path) -> AsyncIterator["RayCluster"]:
        """Reserve what ranks and engines need, within this context; `run` is the folder of the run."""
        from ray.util.placement_group import placement_group, remove_placement_group

        model = {"model": Path(find_model(self._config.model, self._config.base).folder)}
        async with AsyncExitStack() as opened:
            shared = run / f".seen-by-nodes-{secrets.token_hex(4)}"
            shared.touch()
            opened.callback(shared.unlink, missing_ok=True)
            # ranks talk to one another; a lost node is to have few engines
            ranks = placement_group(list(self._plan.ranks), strategy="PACK")
            opened.callback(remove_placement_group, ranks)
            engines = placement_group(list(self._plan.engines), strategy="SPREAD")
            opened.callback(remove_placement_group, engines)
            self._ranks = [
                Reservation(self._ray, ranks, index, f"rank {index}", {"home": shared, **model})
                for index in range(len(self._plan.ranks))
            ]
            self.engines = [
                Reservation(self._ray, engines, index, f"engine {index}", model)
                for index in range(len(self._plan.engines))
            ]
            opened.push_async_callback(self._close)
            yield self

    async def _close(self) -> None:
        await asyncio.gather(*(one.close() for one in (*self._ranks, *self.engines)))

    async def find(self) -> list[Place]:
        """Return the place of each rank. If one cannot be found, the others are not looked for any more."""
        async with running(*(one.find() for one in self._ranks)) as finding:
            return await asyncio.gather(*finding)

    @asynccontextmanager
    async def workers(self, options: WorkerOptions, key: str, log: Path) -> AsyncIterator["ClusterWorkers"]:
        """Keep a worker on every node with a free CPU, within this context; `log` is a folder."""
        stop = asyncio.Event()
        # what a rollout does when the run ends is no longer needed
        pool = RayWorkers(self._ray, replace(options, grace_s=0.0), key, _WORKER_CPUS, log)
        running = asyncio.create_task(pool.run(stop))
        try:
            yield ClusterWorkers(running)
        finally:
            stop.set()
            await asyncio.wait((running,))


class ClusterWorkers:
    """The workers of a run on a cluster, as a part of the run."""

    def __init__(self, running: "asyncio.Task[None]") -> None:
        self._running = running

    async def wait_failed(self) -> NoReturn:
        """Wait until no node can run the agent, and raise the reason."""
        await asyncio.shield(self._running)
        raise AssertionError("it ends only with an error")
