"""Compares two checkouts of Leyden, by default this one with another, in short alternating rounds.

Other load on the machine then slows both down alike. The result is the median over the rounds of each ratio, for the
rate and for the CPU time per operation, which other load hardly touches.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from leyden.api.client import Remote
from leyden.api.endpoint import Endpoint

THIS = Path(__file__).parent.parent

P = ParamSpec("P")
T = TypeVar("T")


class CompatibleRemote(Remote):
    """Sends only fields that differ from their defaults: an older server refuses fields that it does not know."""

    async def call(self, endpoint: Endpoint[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Send one request and decode its reply."""
        send: Callable[..., Awaitable[T]] = super().call
        return await send(endpoint, *map(without_defaults, args), **kwargs)


def without_defaults(body: Any) -> Any:
    """Return a body without the fields that have their default values."""
    if not isinstance(body, msgspec.Struct):
        return [without_defaults(one) for one in body] if isinstance(body, list) else body
    values = ((field, getattr(body, field.name)) for field in msgspec.structs.fields(body))
    return {field.encode_name: without_defaults(value) for field, value in values if value != _default(field)}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def add_against(parser: argparse.ArgumentParser) -> None:
    """Add the options by which two checkouts are compared."""
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with this checkout, by its .venv")
    parser.add_argument("--checkout", type=Path, default=THIS, help="with --against: instead of the present one")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured")


def commits(options: argparse.Namespace) -> dict[str, str]:
    """Return the commits that are compared, with their subjects."""
    return {"this": _commit(options.checkout), "other": _commit(options.against)}


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h %s"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Run(NamedTuple):
    """What a command printed as its last line, and its CPU seconds with those of its child processes."""

    result: Any
    cpu_s: float


def run_in(checkout: Path, *arguments: str) -> Run:
    """Run Python with a checkout's packages in its folder of benchmarks."""
    python = sys.executable if checkout == THIS else str(checkout.resolve() / ".venv" / "bin" / "python")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run([python, *arguments], cwd=checkout / "benchmarks", stdout=subprocess.PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(json.loads(ran.stdout.splitlines()[-1]), round(cpu_s, 2))


def alternate_runs(options: argparse.Namespace, *arguments: str) -> list[tuple[Run, Run]]:
    """Run a benchmark of each checkout as a command, in turn: pairs of the checkout's run and the other's."""
    pairs = []
    this, other = options.checkout, options.against
    for number in range(options.rounds):
        order = (this, other) if number % 2 else (other, this)
        runs = {checkout: run_in(checkout, *arguments) for checkout in order}
        pairs.append((runs[this], runs[other]))
    return pairs


def compare_medians(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians of both sides, and the median of the ratios of this checkout to the other."""
    median = statistics.median
    return {
        "this": round(median(mine for mine, _ in pairs), 4),
        "other": round(median(theirs for _, theirs in pairs), 4),
        "ratio": round(median(mine / theirs for mine, theirs in pairs), 3),
        "ratios": [round(mine / theirs, 3) for mine, theirs in pairs],
    }


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
    """Medians over the rounds; a ratio of rates above 1 means that the first is faster."""
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
