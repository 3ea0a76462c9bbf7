"""Cores, memory, threads and open files that this process may use."""

import os
import resource
from contextlib import suppress
from pathlib import Path


def assigned_cores() -> int:
    """Return the cores that the operating system may run this process on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process can keep busy: those assigned to it, or the quota of its container."""
    cores = assigned_cores()
    try:
        quota, period = quota_file.read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def free_memory(container: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes of memory this process can still take: of the machine's, or of its container's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        free = _number(Path("/proc/meminfo"), "MemAvailable:") * 1024
    with suppress(OSError, ValueError):  # "max" is no limit
        limit = int((container / "memory.max").read_text())
        cached = _number(container / "memory.stat", "inactive_file")  # it is freed when memory is needed
        free = min(free, limit - int((container / "memory.current").read_text()) + cached)
    return free


def _number(file: Path, field: str) -> int:
    """Return the number in the line of a file that begins with a field."""
    return next(int(words[1]) for line in file.read_text().splitlines() if (words := line.split())[0] == field)


def configure_openmp() -> None:
    """Set OMP_WAIT_POLICY, and in a container with a quota OMP_NUM_THREADS, unless they are set.

    Call it before torch is imported. By default threads spin while they wait: on cores that agents, engine and trainer
    share, a spinning thread takes the core from the thread that it waits for. And there is one thread for each core
    of the machine, whatever the quota: more threads than cores make small operations many times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (cores := usable_cores()) < assigned_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, because every worker holds a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
