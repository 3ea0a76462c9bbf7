"""Training while agents go on, on a GPU: an example at several settings, with the same model, tasks and steps.

    python benchmarks/async_cuda.py examples/sql/sql.toml model=FOLDER training.tasks_per_step=24 training.steps=14 \\
        --variants training.max_staleness=0 training.max_staleness=1 training.max_staleness=2 --out results/async

Two adapters as two policies of one vLLM, beside one adapter:

    python benchmarks/async_cuda.py examples/sql/sql.toml model=FOLDER 'training.lora={rank=16}' held_out=0 \\
        checkpoints.optimiser=false --limit-s 560 --out results/adapters --variants \\
        'policy=both' 'policies={writer={roles=["writer","checker"]},rewriter={roles=["rewriter"]}}'

Each variant is a run of its own, one after the other; `--together` makes them at once, for figures that do not depend
on time. With `--limit-s` they share so many seconds: each finishes its step at the end of its part, and saves.

Rollouts per second are over the steps after the second (layers are compiled before), but for those with an evaluation
and those after them. `idle` is the share of their time in which no kernel ran on the GPU, as nvidia-smi samples it.
`held_out` has step, seconds, sampled tokens and reward of every evaluation. `ratio` is the second variant's rollouts
per second over the first one's. Metrics and configuration of each run are kept beside the result.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gpu_step import step_rows
from reporting import add_out, report_result

if TYPE_CHECKING:
    from collections.abc import Iterator

PHASES = ("sampling", "waiting", "training", "publishing")
SAMPLES = "utilization.csv"
GRACE_S = 60.0
"""How long a run may take to finish its step and save."""
COLUMNS = ("step_s", "rollouts_per_s", "tokens_per_s", *(f"{phase}_s" for phase in PHASES), "idle", "staleness_mean")
"""Of the table."""


@contextmanager
def watched_gpu(file: Path) -> "Iterator[None]":
    """Write how busy the GPU is to a file, with times, five times a second."""
    query = ["nvidia-smi", "--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    if shutil.which("nvidia-smi") is None:
        yield
        return
    with file.open("w") as out, subprocess.Popen(query, stdout=out) as process:
        try:
            yield
        finally:
            process.terminate()


def idle_share(file: Path, spans: list[tuple[float, float]]) -> float | None:
    """Return the share of some spans of time in which no kernel ran, None without a GPU."""
    busy = []
    for line in file.read_text().splitlines() if file.exists() else ():
        stamp, _, percent = line.partition(", ")
        whole, _, part = stamp.partition(".")
        at = time.mktime(time.strptime(whole, "%Y/%m/%d %H:%M:%S")) + float(f"0.{part or 0}")
        if any(begin <= at <= end for begin, end in spans) and percent.strip().isdigit():
            busy.append(int(percent) / 100)
    return round(1 - fmean(busy), 3) if busy else None


def start(variant: str, name: str, given: argparse.Namespace, home: Path) -> subprocess.Popen[bytes]:
    """Start a run. Those that start at once compile vLLM's layers in folders of their own."""
    command = [sys.executable, "-m", "leyden", "train", str(given.example), *given.settings, *variant.split()]
    command += [f"home={home}", f"run={name}"]
    own = {"VLLM_CACHE_ROOT": str(home / f"{name}.vllm")} if given.together else {}
    with (home / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **own})


def end(process: subprocess.Popen[bytes], limit_s: float | None) -> int:
    """Wait until a run ends; at the limit have it finish its step. Returns its status."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def figures(folder: Path, samples: Path) -> dict[str, Any] | None:
    """Return what a run's metrics say; None if it made too few steps to time one. Several policies share its steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = step_rows(lines)
    evaluated = [line for line in lines if "held_out/reward" in line]
    pairs = [pair for pair in pairwise(steps[1:]) if not any("held_out/reward" in line for line in pair)]
    if not pairs:
        return None
    counted, spans = [line for _, line in pairs], [(before["time"], line["time"]) for before, line in pairs]
    step_s = fmean(end - begin for begin, end in spans)
    sampled = 0.0
    curve = {}
    for line in lines:
        sampled += line.get("tokens/sampled", 0.0)
        if "held_out/reward" in line:
            seconds, reward = line["time"] - evaluated[0]["time"], line["held_out/reward"]
            curve[line["step"]] = [line["step"], round(seconds, 1), int(sampled), round(reward, 4)]  # for all policies
    return {
        "rollouts_per_s": round(fmean(line["rollouts/requested"] for line in counted) / step_s, 2),
        "tokens_per_s": round(fmean(line["tokens/sampled"] for line in counted) / step_s, 1),
        "step_s": round(step_s, 2),
        "idle": idle_share(samples, spans),
        **{f"{phase}_s": round(fmean(line.get(f"time/{phase}_s", 0.0) for line in counted), 2) for phase in PHASES},
        "staleness_mean": round(fmean(line["staleness/mean"] for line in steps), 3),
        "staleness_max": max(line["staleness/max"] for line in steps),
        "masked": sum(line["tokens/stale"] for line in steps) / sum(line["tokens/sampled"] for line in steps),
        "ess_token": round(fmean(line.get("training/ess_token", 1.0) for line in steps), 4),
        "flat": round(sum(x["groups/flat"] for x in steps) / sum(x["groups/requested"] for x in steps), 3),
        "rollouts": sum(line["rollouts/requested"] for line in steps),
        "tokens": sampled,
        "reward": [round(line["reward/mean"], 3) for line in steps],
        "held_out": [*curve.values()],
    }


def keep(run: Path, log: Path, out: Path) -> None:
    """Copy what a run measured into the folder of results."""
    out.mkdir(parents=True, exist_ok=True)
    for file in (run / "metrics.jsonl", run / "config.toml", log):
        if file.exists():
            shutil.copy(file, out)


def print_table(found: dict[str, dict[str, Any]]) -> None:
    """Print a line for each variant."""
    width = max(map(len, found))
    print(" " * width + "".join(f"{column:>16}" for column in COLUMNS))
    for variant, one in found.items():
        print(f"{variant:{width}}" + "".join(f"{'-' if one[name] is None else one[name]:>16}" for name in COLUMNS))


def main() -> None:
    """Make the runs and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, help="the configuration of the example")
    parser.add_argument("settings", nargs="*", help="settings of all runs, as KEY=VALUE")
    parser.add_argument("--variants", nargs="+", required=True, help="the settings of each run, each in one argument")
    parser.add_argument("--together", action="store_true", help="make all runs at once")
    parser.add_argument("--limit-s", type=float, help="for all runs together, their starts included")
    parser.add_argument("--home", type=Path, help="keep the runs there")
    parser.add_argument("--name", default="benchmark", help="of the file of the result")
    add_out(parser)
    given = parser.parse_intermixed_args()
    found: dict[str, dict[str, Any]] = {}
    names = {variant: f"{given.name}-{number}" for number, variant in enumerate(given.variants)}
    ends = None if given.limit_s is None else time.monotonic() + given.limit_s

    def left(runs: int) -> float | None:
        """Return the part of the time that is left for one of so many runs."""
        return None if ends is None else max(0.0, ends - time.monotonic()) / runs - GRACE_S / 2

    with nullcontext(given.home) if given.home else TemporaryDirectory() as folder:
        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        with watched_gpu(home / SAMPLES):
            running = {}
            for number, (variant, name) in enumerate(names.items()):
                running[variant] = start(variant, name, given, home)
                if not given.together:
                    end(running[variant], left(len(names) - number))
            for variant, process in running.items():
                name = names[variant]
                if end(process, left(1)):
                    print(variant, "failed:", (home / f"{name}.log").read_text()[-2000:], flush=True)
                if given.out:
                    keep(home / name, home / f"{name}.log", given.out / name)
                if (home / name / "metrics.jsonl").exists():
                    one = figures(home / name, home / SAMPLES)
                    print(variant, json.dumps(one), flush=True)
                    found |= {} if one is None else {variant: one}
    if found:
        print_table(found)
    rates = [one["rollouts_per_s"] for one in found.values()]
    result = {"ratio": round(rates[1] / rates[0], 3) if len(rates) > 1 else None, "variants": found}
    report_result(result, given.out, given.name)


if __name__ == "__main__":
    main()
