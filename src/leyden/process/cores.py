"""The cores that this process may use."""

import os
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
