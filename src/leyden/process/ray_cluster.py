"""A Ray cluster: the connection to it, its nodes, and the actor by which processes are started on a node."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct

from leyden.extras import install_command
from leyden.process.descendants import signal_when_parent_ends
from leyden.process.host import ProcessHost
from leyden.process.place import RemotePlace

_CONNECT_TIMEOUT_S = 10.0


class ClusterError(Exception):
    """No cluster was found, or none of its nodes can run the agent; the message says what to change."""


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect Ray to the cluster at an address (`auto`: the one that this machine is part of)."""
    try:
        import ray
    except ImportError:
        raise ClusterError(f"--ray needs Ray: {install_command('ray')}") from None
    try:
        _check_reachable(address)
        ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"there is no Ray cluster at {address!r}: start one with `ray start --head`, or correct --ray-address "
            f"({one_line(error)})"
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


class ClusterNode(Struct, frozen=True):
    """A node of a cluster."""

    id: str
    address: str

    def __str__(self) -> str:
        return f"node {self.id[:8]} at {self.address}"


def node_of(listed: Any) -> ClusterNode:
    """Return a node that Ray lists."""
    return ClusterNode(listed["NodeID"], listed["NodeManagerAddress"])


class LeydenHost:
    """The Ray actor: starts processes on its node (`leyden.process.host`). Its own process does nothing else.

    It listens at the address that Ray knows the node by. Keys come over its connections: the cluster stores arguments.
    """

    def __init__(self) -> None:
        # Ray's processes survive if Ray is killed on a node and its parent does not reap it
        signal_when_parent_ends(signal.SIGKILL)
        with suppress(OSError):  # Ray's processes come after all others; only root can change that
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        self._host = ProcessHost()
        self._place: RemotePlace | None = None

    async def open(self) -> RemotePlace:
        """Listen; return where."""
        import ray

        if self._place is None:
            address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            node = ClusterNode(ray.get_runtime_context().get_node_id(), address)
            self._place = await self._host.open(address, str(node))
        return self._place

    async def close(self) -> None:
        """Delete what processes left."""
        self._host.close()


def one_line(error: Exception) -> str:
    """Format an error in one line: the exception that the worker raised, or else what Ray reports."""
    raised = getattr(error, "cause", None)
    return str(error).strip().partition("\n")[0] if raised is None else f"{type(raised).__name__}: {raised}"
