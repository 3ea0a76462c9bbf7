"""Options of a worker: what it runs, the sections of the configuration that it needs, and its size on this machine."""

import os
import re
import socket

import msgspec
from msgspec import Struct

from leyden import defaults
from leyden.config.schema import NotNegative, Positive, RolloutConfig, ServiceConfig, WorkerConfig


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
    rollout: RolloutConfig = RolloutConfig()
    workers: WorkerConfig = WorkerConfig()
    services: dict[str, ServiceConfig] = {}
    """Started once by this worker, each used by one rollout at a time."""
    grace_s: NotNegative = 10.0
    """How long attempts may continue after the worker was stopped; then they are given back."""
    unresponsive_s: Positive = 15.0
    """How long the event loop of a host process may be blocked before the process takes no new attempts."""
    hidden: tuple[str, ...] = ()
    """Folders and files that sandboxes hide if they are inside of what they show."""
    name: str = msgspec.field(default_factory=_default_name)

    def __post_init__(self) -> None:
        if self.processes < 1 or self.concurrency < self.processes:
            raise ValueError("`processes` must be at least 1, and `concurrency` at least `processes`")
