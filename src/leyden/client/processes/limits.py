"""Resource limits of processes that run agents."""

import resource

from leyden.process.descendants import prefer_for_oom_kill

_THREAD_STACK = 8 << 20
"""Address space of a thread's stack if the limit of stacks is not finite."""


def apply_limits(memory_mb: int | None, cpu_s: float | None = None, threads: int = 0) -> None:
    """Limit this process, which has just started, and its descendants; the stacks of its threads are no memory."""
    prefer_for_oom_kill()
    if memory_mb is not None:  # not RLIMIT_AS: address space that is only reserved costs nothing
        size = (memory_mb << 20) + threads * _stack_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    if cpu_s is not None:
        seconds = max(1, round(cpu_s))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _stack_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _THREAD_STACK if soft == resource.RLIM_INFINITY else soft
