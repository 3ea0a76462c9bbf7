"""Resource limits of processes that run agents."""

import os
import resource

from msgspec import Struct

from leyden.client.isolation.options import Mode
from leyden.process.descendants import prefer_for_oom_kill

_THREAD_STACK = 8 << 20
"""Address space of a thread's stack where the limit of stacks is not finite."""


class ResourceLimits(Struct, frozen=True):
    """Limits of each process; None: no limit."""

    memory_mb: int | None = None
    cpu_s: float | None = None
    threads: int = 0
    """How many threads the process will start; their stacks do not count as memory."""

    def apply(self) -> None:
        """Apply the limits to this process, which has just started, and its descendants."""
        prefer_for_oom_kill()
        if self.memory_mb is not None:  # not RLIMIT_AS: address space that is only reserved costs nothing
            size = (self.memory_mb << 20) + self.threads * _stack_bytes()
            resource.setrlimit(resource.RLIMIT_DATA, (size, size))
        if self.cpu_s is not None:
            seconds = max(1, round(self.cpu_s))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _stack_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _THREAD_STACK if soft == resource.RLIM_INFINITY else soft


def memory_limit_mb(configured: int | None, mode: Mode) -> int | None:
    """Return the memory limit of a process: the configured one; in a sandbox without one, half of the machine's."""
    if configured is not None or mode != "sandbox":
        return configured
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 >> 20
