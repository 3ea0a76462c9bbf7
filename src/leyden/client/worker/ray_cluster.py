"""Keeps one worker on every suitable node of a Ray cluster while nodes join, leave and fail.

Ray only places workers and reports when one is gone. Each worker uses the server over HTTP like any other, so the
attempts of a lost node are retried elsewhere when their leases expire. All workers end when this process ends.
"""

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from leyden.background import wait_set
from leyden.backoff import Backoff
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.process import REFUSED, WorkerProcess
from leyden.process.ray_cluster import ClusterError, ClusterNode, LeydenHost, node_of, one_line
from leyden.process.rotating_log import RotatingLog, TerminalLog

_log = logging.getLogger("leyden.cluster")
_POLL_S = 1.0
"""How often the nodes are listed: Ray does not notify of changes."""
_RESTART_BACKOFF = Backoff(first_s=1.0, max_s=30.0)
_STABLE_S = 60.0
"""A worker that lived this long starts the back-off anew."""
_EXIT_TIMEOUT_S = 10.0


class RayWorkers:
    """The workers of one run on a cluster. A node that cannot run the agent is skipped as long as another can."""

    def __init__(self, ray: Any, options: WorkerOptions, key: str, cpus: int, log: Path | None = None) -> None:
        """Each worker reserves `cpus` of its node; nodes with fewer get no worker.

        `log` is a folder, for a file of each node; without one, output goes where that of this process goes.
        """
        self._ray, self._options, self._key, self._cpus, self._log = ray, options, key, cpus, log
        self._keepers: dict[ClusterNode, asyncio.Task[None]] = {}
        self._workers: dict[ClusterNode, WorkerProcess] = {}
        self._refusals: dict[ClusterNode, str] = {}
        self._stopping = self._warned_no_nodes = False

    async def run(self, stop: asyncio.Event) -> None:
        """Keep a worker on every node until `stop` is set, then have them finish within their grace time."""
        try:
            while not stop.is_set():
                self._update(await asyncio.to_thread(self._nodes))
                await wait_set(stop, _POLL_S)
        finally:
            self._stopping = True
            await asyncio.gather(*map(self._stop_node, list(self._keepers)))

    def _nodes(self) -> set[ClusterNode]:
        """Return the nodes that are alive and have enough CPUs."""
        return {
            node_of(node)
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= self._cpus
        }

    def _update(self, nodes: set[ClusterNode]) -> None:
        """Start workers on new nodes, and drop nodes that are gone."""
        for keeper in self._keepers.values():
            if keeper.done():
                keeper.result()  # returns where the node was refused; raises any other error
        for node in self._keepers.keys() - nodes:
            _log.warning("%s is gone", node)
            self._keepers.pop(node).cancel()
            self._refusals.pop(node, None)
        for node in nodes - self._keepers.keys():
            self._keepers[node] = asyncio.create_task(self._keep(node))
        if not nodes and not self._warned_no_nodes:
            _log.warning("no node of the cluster has %d CPUs: waiting for one", self._cpus)
        self._warned_no_nodes = not nodes
        if nodes and nodes == self._refusals.keys():
            raise ClusterError(f"no node of the cluster can run this: {next(iter(self._refusals.values()))}")

    async def _keep(self, node: ClusterNode) -> None:
        """Keep a worker on a node: start another when it dies."""
        failures = 0
        while not self._stopping:
            started = time.monotonic()
            refusal = await self._run_worker(node)
            if refusal is not None:
                _log.warning("%s is left out: %s", node, refusal)
                self._refusals[node] = refusal
                return
            failures = 1 if time.monotonic() - started > _STABLE_S else failures + 1
            if not self._stopping:
                await _RESTART_BACKOFF.wait(failures)

    async def _run_worker(self, node: ClusterNode) -> str | None:
        """Start a worker on a node and wait until it is gone. Returns why the node cannot run the agent, or None."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        actor = self._ray.remote(LeydenHost).options(num_cpus=self._cpus, scheduling_strategy=strategy)
        host, output = actor.remote(), self._output(node)
        _log.info("starting a worker on %s", node)
        try:
            options = replace(self._options, name=f"ray-{node.id[:8]}-{os.getpid()}")
            worker = self._workers[node] = WorkerProcess(options, self._key, output, await host.open.remote())
            status = await worker.wait()
            reason = (output.last_line() or "it printed nothing").removeprefix("leyden worker: ")
            if status == REFUSED:
                return reason
            if status and not self._stopping:
                _log.warning("the worker on %s is gone: %s", node, reason)
        except self._ray.exceptions.RayError as gone:
            _log.warning("the worker on %s is gone: %s", node, one_line(gone))
        finally:
            if (started := self._workers.pop(node, None)) is not None:
                started.kill()
            with suppress(self._ray.exceptions.RayError):
                host.close.remote()
            self._ray.kill(host)
        return None

    def _output(self, node: ClusterNode) -> RotatingLog:
        return TerminalLog() if self._log is None else RotatingLog(self._log / f"worker-{node.id[:8]}.log")

    async def _stop_node(self, node: ClusterNode) -> None:
        """Have a node's worker finish. One that takes too long is killed with its agents."""
        keeper, worker = self._keepers[node], self._workers.get(node)
        if worker is not None:
            worker.stop()
            await asyncio.wait((keeper,), timeout=self._options.grace_s + _EXIT_TIMEOUT_S)
        keeper.cancel()
        await asyncio.wait((keeper,))
