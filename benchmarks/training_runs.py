"""Makes many training runs, several at a time, each a process on cores of its own.

Every finished run is a line of a file at once, and is not made again. At the time limit, runs finish their step and
save; the same command later goes on from there.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from leyden.orchestrator.json_lines import read_lines

COMMAND = [sys.executable, "-m", "leyden", "train"]
GRACE_S = 60.0
"""How long a run may take to finish its step and save."""
TIMES = ("time/training_s", "time/publishing_s")
SHARED_TIMES = ("time/sampling_s", "time/evaluation_s")
"""Those that all policies of a run have together."""

Run = dict[str, Any]
Key = tuple[Any, ...]


def add_runs(parser: argparse.ArgumentParser, default: Path) -> None:
    """Add the options of `make_runs`."""
    known = "every finished run is a line of it; those there are not repeated"
    parser.add_argument("--runs", type=Path, metavar="FILE", default=default, help=f"{known} (default: {default})")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--threads", type=int, help="cores of each run (default: all cores, shared by the jobs)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after this time, to go on later")


def make_runs(
    fields: tuple[str, ...],
    wanted: Mapping[Key, list[str]],
    measure: Callable[[list[dict[str, Any]]], Run],
    options: argparse.Namespace,
    inspect: Callable[[list[str], Path], Run] = lambda arguments, folder: {},
) -> dict[Key, Run]:
    """Return the runs that are there by their `fields`, after making the missing ones as far as the limit allows.

    `wanted` has the arguments of `leyden train` for each; `measure` gets the metrics of all steps, of several policies
    a line for each, and `inspect` the arguments and the folder of the finished run.
    """
    deadline = time.monotonic() + options.limit_s
    kept = options.runs.read_text(encoding="utf-8").splitlines() if options.runs.exists() else []
    runs: dict[Key, Run] = {tuple(run[name] for name in fields): run for run in map(json.loads, kept)}
    missing = [key for key in wanted if key not in runs]
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    unfinished, writing = options.runs.with_suffix(".unfinished"), Lock()

    def make(key: Key) -> None:
        home = unfinished / re.sub(r"[^\w.=-]+", "_", " ".join(map(str, key)))
        if time.monotonic() < deadline and train(wanted[key], home, deadline):
            metrics = read_lines(home / "run" / "metrics.jsonl")
            first = [row for row in metrics if row["policy"] == metrics[0]["policy"]]
            seconds = sum(row.get(name, 0.0) for row in metrics for name in TIMES)
            seconds += sum(row.get(name, 0.0) for row in first for name in SHARED_TIMES)
            run = {**dict(zip(fields, key, strict=True)), **measure(metrics), "seconds": round(seconds)}
            run |= inspect(wanted[key], home / "run")
            with writing, options.runs.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            runs[key] = run
            shutil.rmtree(home)
            print(f"{sum(key in runs for key in wanted)} of {len(wanted)}: {json.dumps(run)}", flush=True)

    slots = itertools.count()
    with ThreadPoolExecutor(options.jobs, initializer=lambda: use_cores(next(slots), options.threads)) as pool:
        for _ in pool.map(make, missing):
            pass
    if unfinished.exists() and not any(unfinished.iterdir()):
        unfinished.rmdir()
    return runs


def use_cores(slot: int, threads: int | None) -> None:
    """Keep the processes that this thread starts on cores of their own; some are shared if there are too few."""
    if threads is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(slot * threads + n) % len(cores)] for n in range(threads)})


def train(arguments: list[str], home: Path, deadline: float) -> bool:
    """Run or continue one training in a folder; return whether it is finished."""
    home.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))  # a container with a quota would say fewer
    command = [*COMMAND, *arguments, f"home={home}", "run=run"]
    with (home / "output").open("ab") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": str(cores)}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        stopped = False
        for left in (deadline - time.monotonic(), GRACE_S, GRACE_S):
            try:
                process.wait(left if left != float("inf") else None)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                stopped = True
        else:
            process.kill()
            process.wait()
    if process.returncode and not stopped:
        print(f"{home} failed:\n{(home / 'output').read_text(errors='replace')[-3000:]}", file=sys.stderr, flush=True)
    return process.returncode == 0 and not stopped
