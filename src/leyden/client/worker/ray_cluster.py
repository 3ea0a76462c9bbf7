"""Workers over a Ray cluster: one on every node with room for it, while the cluster grows, shrinks and loses nodes.

Ray places them and says when one is gone, nothing else: each meets the server over HTTP like any worker, so what a lost
node was at goes to another when its leases run out. All of them end when this process does, however it ends.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from leyden.client.processes.descendants import adopt_orphans, die_with_parent
from leyden.client.worker.worker import WorkerOptions, work
from leyden.loading import LoadError
from leyden.remote import RemoteError

_log = logging.getLogger("leyden.cluster")
_FOLLOW_S = 1.0
"""Between two looks at the cluster, which tells nobody when it changes."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 0.5, 30.0, 60.0
_ANSWER_S, _END_S = 10.0, 10.0


class ClusterError(Exception):
    """There is no cluster to work on, or none of its nodes can; the message says what to change."""


@contextmanager
def joined(address: str) -> Iterator[Any]:
    """Ray, connected to the cluster at an address (`auto`: the one that this machine is part of)."""
    try:
        import ray
    except ImportError:
        raise ClusterError("workers on a Ray cluster need Ray: pip install 'leyden[ray]'") from None
    try:
        _reach(address)
        ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"there is no Ray cluster at {address!r}: begin one with `ray start --head`, or correct --ray-address "
            f"({_line(error)})"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise where nobody answers: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), _ANSWER_S).close()


class LeydenWorker:
    """A worker, as Ray runs it on a node: this process is the worker, and agents have processes of their own.

    Its key comes by a call of `work`: what actors are made with is kept by the cluster.
    """

    def __init__(self) -> None:
        self._stop = asyncio.Event()

    async def work(self, options: WorkerOptions, key: str) -> str | None:
        """Work until told to stop; why there is no use in trying again here, or None."""
        die_with_parent()  # Ray's processes live on where Ray is killed on a node and nobody buries it
        adopt_orphans()
        try:
            await work(options, key, self._stop)
        except (LoadError, RemoteError) as refused:
            return str(refused)
        return None

    async def stop(self) -> None:
        """Finish, within the grace time."""
        self._stop.set()


class _Node(Struct, frozen=True):
    id: str
    address: str

    def __str__(self) -> str:
        return f"node {self.id[:8]} at {self.address}"


class RayWorkers:
    """The workers of one run on a cluster. A node that cannot run the agent is left out, as long as another can."""

    def __init__(self, ray: Any, options: WorkerOptions, key: str, cpus: int) -> None:
        """Each worker reserves `cpus` of its node; nodes that have fewer get none."""
        self._ray, self._options, self._key, self._cpus = ray, options, key, cpus
        self._keeping: dict[_Node, asyncio.Task[None]] = {}
        self._workers: dict[_Node, Any] = {}
        self._refusals: dict[_Node, str] = {}
        self._stopping = self._without_nodes = False

    async def follow(self, stop: asyncio.Event) -> None:
        """Keep a worker on every node until `stop` is set, then have them finish within their grace time."""
        try:
            while not stop.is_set():
                self._match(await asyncio.to_thread(self._nodes))
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _FOLLOW_S)
        finally:
            self._stopping = True
            await asyncio.gather(*map(self._end, list(self._keeping)))

    def _nodes(self) -> set[_Node]:
        """Those that are alive and large enough."""
        return {
            _Node(node["NodeID"], node["NodeManagerAddress"])
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= self._cpus
        }

    def _match(self, nodes: set[_Node]) -> None:
        """Begin where a node is new, and forget those that are gone."""
        for keeping in self._keeping.values():
            if keeping.done():
                keeping.result()  # where it was refused; anything else is raised
        for node in self._keeping.keys() - nodes:
            _log.info("%s is gone", node)
            self._keeping.pop(node).cancel()
            self._refusals.pop(node, None)
        for node in nodes - self._keeping.keys():
            self._keeping[node] = asyncio.create_task(self._keep(node))
        if not nodes and not self._without_nodes:
            _log.warning("no node of the cluster has %d CPUs: waiting for one", self._cpus)
        self._without_nodes = not nodes
        if nodes and nodes == self._refusals.keys():
            raise ClusterError(f"no node of the cluster can run this: {next(iter(self._refusals.values()))}")

    async def _keep(self, node: _Node) -> None:
        """Have a worker on a node, and another when it dies."""
        pause = _FIRST_PAUSE_S
        while not self._stopping:
            began = time.monotonic()
            refusal = await self._have_work_done(node)
            if refusal is not None:
                _log.warning("%s is left out: %s", node, refusal)
                self._refusals[node] = refusal
                return
            steady = time.monotonic() - began > _STEADY_S
            pause = _FIRST_PAUSE_S if steady else min(_LONGEST_PAUSE_S, 2 * pause)
            if not self._stopping:
                await asyncio.sleep(pause)

    async def _have_work_done(self, node: _Node) -> str | None:
        """Place a worker and wait until it is gone; why there is no use in another, or None."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        made = self._ray.remote(LeydenWorker).options(num_cpus=self._cpus, scheduling_strategy=there)
        worker = self._workers[node] = made.remote()
        _log.info("a worker for %s", node)
        try:
            options = replace(self._options, name=f"ray-{node.id[:8]}-{os.getpid()}")
            refusal: str | None = await worker.work.remote(options, self._key)
            return refusal
        except self._ray.exceptions.RayError as gone:
            _log.warning("the worker on %s is gone: %s", node, _line(gone))
            return None
        finally:
            del self._workers[node]
            self._ray.kill(worker)

    async def _end(self, node: _Node) -> None:
        """Have a node's worker finish; one that does not answer, or takes too long, is killed with all that it runs."""
        keeping, worker = self._keeping[node], self._workers.get(node)
        if worker is not None:
            with suppress(TimeoutError, self._ray.exceptions.RayError):
                await asyncio.wait_for(worker.stop.remote(), _ANSWER_S)
                await asyncio.wait((keeping,), timeout=self._options.grace_s + _END_S)
        keeping.cancel()
        await asyncio.wait((keeping,))


def _line(error: Exception) -> str:
    """An error in one line: what Ray says of the worker, or what the worker itself raised."""
    raised = getattr(error, "cause", None)
    return str(error).strip().partition("\n")[0] if raised is None else f"{type(raised).__name__}: {raised}"
