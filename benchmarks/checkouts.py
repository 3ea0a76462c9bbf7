"""Compares this checkout of Leyden with another one: both servers run, and short rounds alternate between them.

Other load on the machine then slows both down alike. The result is the median over the rounds of each ratio, for the
rate and for the server's CPU time per operation, which other load hardly touches.
"""

import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

THIS = Path(__file__).parent.parent


class Measured(NamedTuple):
    """One round on one server."""

    per_s: float
    cpu_ms: float
    """The server's CPU time per operation."""


async def measure(pid: int, operations: Callable[[], Awaitable[int]]) -> Measured:
    """Run one round and count its operations."""
    cpu, started = cpu_seconds(pid), time.perf_counter()
    done = await operations()
    return Measured(done / (time.perf_counter() - started), (cpu_seconds(pid) - cpu) / done * 1e3)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def alternate(
    this: Callable[[], Awaitable[Measured]], other: Callable[[], Awaitable[Measured]], rounds: int
) -> dict[str, float]:
    """Medians over the rounds; a ratio of rates above 1 means that this checkout is faster."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            mine = await this()
            theirs = await other()
        else:
            theirs = await other()
            mine = await this()
        pairs.append((mine, theirs))
    median = statistics.median
    return {
        "per_s": round(median(mine.per_s for mine, _ in pairs), 1),
        "other_per_s": round(median(theirs.per_s for _, theirs in pairs), 1),
        "ratio": round(median(mine.per_s / theirs.per_s for mine, theirs in pairs), 3),
        "cpu_ms": round(median(mine.cpu_ms for mine, _ in pairs), 3),
        "other_cpu_ms": round(median(theirs.cpu_ms for _, theirs in pairs), 3),
        "cpu_ratio": round(median(mine.cpu_ms / theirs.cpu_ms for mine, theirs in pairs), 3),
    }
