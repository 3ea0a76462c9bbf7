"""Keeps one worker on every suitable node of a Ray cluster while nodes join, leave and fail.

Ray only places workers and reports when one is gone. Each worker uses the server over HTTP like any other, so the
attempts of a lost node are retried elsewhere when their leases expire. All workers end when this process ends.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from leyden.api.client import RemoteError
from leyden.background import wait_set
from leyden.backoff import Backoff
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.worker import work
from leyden.extras import install_command
from leyden.process.descendants import signal_when_parent_ends
from leyden.user_code.loading import LoadError

_log = logging.getLogger("leyden.cluster")
_POLL_S = 1.0
"""How often the nodes are listed: Ray does not notify of changes."""
_RESTART_BACKOFF = Backoff(first_s=1.0, max_s=30.0)
_STABLE_S = 60.0
"""A worker that lived this long starts the back-off anew."""
_CONNECT_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S, _EXIT_TIMEOUT_S = 10.0, 10.0


class ClusterError(Exception):
    """No cluster was found, or none of its nodes can run the agent; the message says what to change."""


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect Ray to the cluster at an address (`auto`: the one that this machine is part of)."""
    try:
        import ray
    except ImportError:
        raise ClusterError(f"workers on a Ray cluster need Ray: {install_command('ray')}") from None
    try:
        _check_reachable(address)
        ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"there is no Ray cluster at {address!r}: start one with `ray start --head`, or correct --ray-address "
            f"({_one_line(error)})"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at the address: Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


class LeydenWorker:
    """The Ray actor: its process is the worker, and agents run in child processes.

    The key is an argument of `work` and not of the constructor: the cluster stores constructor arguments.
    """

    def __init__(self) -> None:
        self._stop = asyncio.Event()

    async def work(self, options: WorkerOptions, key: str) -> str | None:
        """Work until `stop` is called. Returns why this node cannot run the agent, or None."""
        # Ray's processes survive if Ray is killed on a node and its parent does not reap it
        signal_when_parent_ends(signal.SIGKILL)
        try:
            await work(options, key, self._stop)
        except (LoadError, RemoteError) as refused:
            return str(refused)
        return None

    async def stop(self) -> None:
        """Finish within the grace time."""
        self._stop.set()


class _Node(Struct, frozen=True):
    id: str
    address: str

    def __str__(self) -> str:
        return f"node {self.id[:8]} at {self.address}"


class RayWorkers:
    """The workers of one run on a cluster. A node that cannot run the agent is skipped as long as another can."""

    def __init__(self, ray: Any, options: WorkerOptions, key: str, cpus: int) -> None:
        """Each worker reserves `cpus` of its node; nodes with fewer get no worker."""
        self._ray, self._options, self._key, self._cpus = ray, options, key, cpus
        self._keepers: dict[_Node, asyncio.Task[None]] = {}
        self._workers: dict[_Node, Any] = {}
        self._refusals: dict[_Node, str] = {}
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

    def _nodes(self) -> set[_Node]:
        """Return the nodes that are alive and have enough CPUs."""
        return {
            _Node(node["NodeID"], node["NodeManagerAddress"])
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= self._cpus
        }

    def _update(self, nodes: set[_Node]) -> None:
        """Start workers on new nodes, and drop nodes that are gone."""
        for keeper in self._keepers.values():
            if keeper.done():
                keeper.result()  # returns where the node was refused; raises any other error
        for node in self._keepers.keys() - nodes:
            _log.info("%s is gone", node)
            self._keepers.pop(node).cancel()
            self._refusals.pop(node, None)
        for node in nodes - self._keepers.keys():
            self._keepers[node] = asyncio.create_task(self._keep(node))
        if not nodes and not self._warned_no_nodes:
            _log.warning("no node of the cluster has %d CPUs: waiting for one", self._cpus)
        self._warned_no_nodes = not nodes
        if nodes and nodes == self._refusals.keys():
            raise ClusterError(f"no node of the cluster can run this: {next(iter(self._refusals.values()))}")

    async def _keep(self, node: _Node) -> None:
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

    async def _run_worker(self, node: _Node) -> str | None:
        """Start a worker on a node and wait until it is gone. Returns why the node cannot run the agent, or None."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        actor = self._ray.remote(LeydenWorker).options(num_cpus=self._cpus, scheduling_strategy=strategy)
        worker = self._workers[node] = actor.remote()
        _log.info("starting a worker on %s", node)
        try:
            options = replace(self._options, name=f"ray-{node.id[:8]}-{os.getpid()}")
            refusal: str | None = await worker.work.remote(options, self._key)
            return refusal
        except self._ray.exceptions.RayError as gone:
            _log.warning("the worker on %s is gone: %s", node, _one_line(gone))
            return None
        finally:
            del self._workers[node]
            self._ray.kill(worker)

    async def _stop_node(self, node: _Node) -> None:
        """Have a node's worker finish. One that does not answer or takes too long is killed with its agents."""
        keeper, worker = self._keepers[node], self._workers.get(node)
        if worker is not None:
            with suppress(TimeoutError, self._ray.exceptions.RayError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await worker.stop.remote()
                await asyncio.wait((keeper,), timeout=self._options.grace_s + _EXIT_TIMEOUT_S)
        keeper.cancel()
        await asyncio.wait((keeper,))


def _one_line(error: Exception) -> str:
    """Format an error in one line: the exception that the worker raised, or else what Ray reports."""
    raised = getattr(error, "cause", None)
    return str(error).strip().partition("\n")[0] if raised is None else f"{type(raised).__name__}: {raised}"
