"""Whether rewards that the record shows by itself, given to the calls that earned them, make learning faster.

The bundled model learns a task of two steps (tests/local/table: ask a table by SQL, then answer; only the right answer
is rewarded, and a query that SQLite refuses cannot be made up for), three ways, all else equal, with the same seeds:

    identical             every call gets the final reward
    identical + signals   every call gets it, less what failed tools cost
    stepwise + signals    every call gets it, and the call that failed bears the cost

    python benchmarks/credit.py

The last line is one JSON object; `ratio` is the steps that `identical` takes to the threshold over those of `stepwise +
signals`, means over seeds. A run that does not get there counts as one step more than it had.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "local"))

from tables import steps, train_table

WAYS = {"identical": "identical", "identical + signals": "identical", "stepwise + signals": "stepwise"}
"""With which credit."""
THRESHOLD = 0.6
"""Of the mean reward of a step."""


def measure(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: the reward of the task alone, step by step, and on tasks held out."""
    settings = [f"seed={seed}", f"training.steps={options.steps}", f"training.learning_rate={options.learning_rate}"]
    settings += ["training.schedule=constant", f"algorithm.credit={WAYS[way]}"]
    if signals := way.endswith("signals"):
        settings.append(f"signals.tool_failed={options.tool_failed}")
    with tempfile.TemporaryDirectory() as folder:
        trained = train_table(Path(folder), *settings)
        samples = steps(trained)
    rewards = [round(sample["reward/mean"], 4) for sample in samples]
    there = next((step for step, reward in enumerate(rewards, 1) if reward >= THRESHOLD), options.steps + 1)
    return {
        "way": way,
        "seed": seed,
        "steps_to_threshold": there,
        "held_out": [trained.before, trained.after],
        "mean_reward": round(fmean(rewards), 4),
        "failed_queries": [int(sample.get("signals/tool_failed", 0)) for sample in samples] if signals else None,
        "rewards": rewards,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and how far they spread."""
    metrics = {
        "steps_to_threshold": [run["steps_to_threshold"] for run in runs],
        "mean_reward": [run["mean_reward"] for run in runs],
        "held_out_after": [run["held_out"][1] for run in runs],
    }
    means = {name: round(fmean(values), 3) for name, values in metrics.items()}
    spread = {f"{name}_deviation": round(stdev(values), 3) for name, values in metrics.items() if len(values) > 1}
    return means | spread


def main() -> None:
    """All ways, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--tool-failed", type=float, default=-0.5, help="what a query that SQLite refuses costs")
    parser.add_argument("--out", type=Path, help="a file to keep the result in")
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        for way in WAYS:
            runs.append(measure(way, seed, options))
            print(json.dumps(runs[-1]), flush=True)
    ways = {way: summary([run for run in runs if run["way"] == way]) for way in WAYS}
    for way, found in ways.items():
        print(f"{way:20} {found}")
    taken = [ways[way]["steps_to_threshold"] for way in ("identical", "stepwise + signals")]
    result = {
        "ratio": round(taken[0] / taken[1], 2),
        "threshold": THRESHOLD,
        "seeds": options.seeds,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "tool_failed": options.tool_failed,
        "ways": ways,
    }
    if options.out is not None:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**about, "result": result, "runs": runs}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
