"""What is isolated, and how."""

import os
from typing import Literal

from msgspec import Struct

from leyden.config.schema import RolloutConfig, WorkerConfig

Mode = Literal["none", "user", "sandbox"]
ModeChoice = Literal["none", "user", "sandbox", "auto"]


class IsolationOptions(Struct, frozen=True, kw_only=True):
    """How processes with agent code are isolated on this machine."""

    mode: Mode = "none"
    server: str = ""
    """The URL of the gateway."""
    base: str = "."
    """The agent's folder, which a sandbox shows read-only."""
    path: tuple[str, ...] = ()
    """Folders of Python modules, which a sandbox shows read-only."""
    rollout: RolloutConfig = RolloutConfig()
    workers: WorkerConfig = WorkerConfig()
    hidden: tuple[str, ...] = ()
    """Folders of runs and files with keys, which a sandbox hides if they are inside of what it shows."""
    sockets: str = ""
    """The folder in which the forwarder of the worker listens, one Unix socket for each of `targets`."""

    @property
    def memory_mb(self) -> int | None:
        """Memory limit of an agent's processes: the configured one; in a sandbox without one, half of the machine's."""
        if self.rollout.memory_mb is not None or self.mode != "sandbox":
            return self.rollout.memory_mb
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 >> 20


class SandboxUnavailable(Exception):
    """A mode does not work here; the message says why."""
