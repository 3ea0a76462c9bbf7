"""Measures what this process and its descendants use: cores and memory, and what the GPUs of the machine do."""

import asyncio
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from leyden.process.descendants import descendants
from leyden.process.memory_use import proportional_bytes

_GPU_QUERY = ("--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_GPU_TIMEOUT_S = 5.0
_INTERVAL_S = 5.0


class ResourceUse(Struct, frozen=True, omit_defaults=True):
    """What processes use."""

    cores: float
    """Cores that they kept busy on average since the last measurement."""
    memory_gb: float
    gpu: float | None = None
    """The share of the last moment in which a GPU computed, averaged over the machine's; None without GPUs."""
    gpu_memory_gb: float | None = None


class ResourceMeter:
    """Measures this process and its descendants. Elsewhere than on Linux it measures nothing."""

    def __init__(self) -> None:
        self._at, self._seconds = time.monotonic(), _cpu_seconds()

    def measure(self) -> ResourceUse | None:
        """Measure what was used since the last call. With GPUs this takes a moment: call it in a thread."""
        at, seconds = time.monotonic(), _cpu_seconds()
        cores = max(0.0, seconds - self._seconds) / max(at - self._at, 1e-3)
        self._at, self._seconds = at, seconds
        memory = sum(map(proportional_bytes, (os.getpid(), *descendants())))
        return ResourceUse(cores, memory / 2**30, *_read_gpus()) if memory else None


class UseReports:
    """Measures every five seconds. Each measurement goes with one request for rollouts."""

    def __init__(self) -> None:
        self._latest: ResourceUse | None = None

    async def run(self) -> None:
        """Measure until cancelled."""
        meter = ResourceMeter()
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self._latest = await asyncio.to_thread(meter.measure)

    def take(self) -> ResourceUse | None:
        """Return the last measurement, unless it was returned before."""
        latest, self._latest = self._latest, None
        return latest


def _cpu_seconds() -> float:
    """Return the processor time of this process and its descendants; also of those that ended and were waited for."""
    ticks = 0
    for pid in (os.getpid(), *descendants()):
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # of itself and of its children, for the user and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


def _read_gpus() -> tuple[float | None, float | None]:
    """Return the mean utilisation and the memory in use of NVIDIA's GPUs, in GB; None if there are none."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None, None
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        run = subprocess.run([program, *_GPU_QUERY], capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
        gpus = [tuple(map(float, line.split(","))) for line in run.stdout.splitlines()]
        if gpus:
            return sum(share for share, _ in gpus) / len(gpus) / 100, sum(memory for _, memory in gpus) / 1024
    return None, None
