"""Whether rewards that the record shows by itself, given to the calls that earned them, make learning faster.

The bundled model learns a task of two steps (tests/local/table: ask a table by SQL, then answer; only the right answer
is rewarded, and a query that SQLite refuses cannot be made up for), six ways, all else equal, with the same seeds:

    identical             every call gets the final reward
    identical + signals   every call gets it, less what failed tools cost
    stepwise + signals    every call gets it, and the call that failed bears the cost
    stepwise + scaled     the same, with costs in units of the deviation of the group's final rewards (scale_steps)
    success by group      every call gets it, a query that SQLite accepts 1 more; a group's calls are compared with all
    success by turn       the same; queries are compared with queries, and answers with answers

    python benchmarks/credit.py
    python benchmarks/credit.py --raw runs.jsonl --limit 1      # one run at a time; those in the file are not repeated

The last line is one JSON object; `ratio` is the steps that `identical` takes to the threshold over those of `stepwise +
signals`, means over seeds. A run that does not get there counts as one step more than it had. `difference` is the
paired difference of the mean reward over all steps from `identical`, seed by seed, with its standard error.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "local"))

from reporting import add_out, report_result
from tables import steps, train_table

from leyden.estimates import compare

STEPWISE = ("algorithm.credit=stepwise", "algorithm.compare=group")
WAYS: dict[str, tuple[str, ...]] = {
    "identical": (),
    "identical + signals": ("signals.tool_failed={cost}",),
    "stepwise + signals": (*STEPWISE, "signals.tool_failed={cost}"),
    "stepwise + scaled": (*STEPWISE, "signals.tool_failed={cost}", "algorithm.scale_steps=true"),
    "success by group": (*STEPWISE, "signals.tool_succeeded=1"),
    "success by turn": ("algorithm.credit=stepwise", "signals.tool_succeeded=1"),
}
"""With which settings."""
THRESHOLD = 0.6
"""Of the mean reward of a step."""


def measure(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once; return the reward of the task alone, step by step, and on held-out tasks."""
    settings = [f"seed={seed}", f"training.steps={options.steps}", f"training.learning_rate={options.learning_rate}"]
    settings += ["training.schedule=constant", *(one.format(cost=options.tool_failed) for one in WAYS[way])]
    with tempfile.TemporaryDirectory() as folder:
        trained = train_table(Path(folder), *settings)
        samples = steps(trained)
    rewards = [round(sample["reward/mean"], 4) for sample in samples]
    costs = any("tool_failed" in setting for setting in WAYS[way])
    there = next((step for step, reward in enumerate(rewards, 1) if reward >= THRESHOLD), options.steps + 1)
    return {
        "way": way,
        "seed": seed,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "tool_failed": options.tool_failed if costs else None,
        "steps_to_threshold": there,
        "held_out": [trained.before, trained.after],
        "mean_reward": round(fmean(rewards), 4),
        "failed_queries": [int(sample.get("signals/tool_failed", 0)) for sample in samples] if costs else None,
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


def difference(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the mean reward of runs with that of `identical`, seed by seed."""
    found = compare(*({str(run["seed"]): [run["mean_reward"]] for run in some} for some in (plain, runs)))
    assert found is not None, "every way has every seed"
    error = round(found.error, 4) if found.error is not None else None
    return {"mean_reward": round(found.difference, 4), "error": error, "seeds": found.tasks}


def main() -> None:
    """Measure all ways, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--tool-failed", type=float, default=-0.1, help="what a query that SQLite refuses costs")
    parser.add_argument("--raw", type=Path, help="a file of finished runs, to which new ones are added")
    parser.add_argument("--limit", type=int, help="stop after this many new runs")
    add_out(parser)
    options = parser.parse_args()
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    for line in options.raw.read_text().splitlines() if options.raw and options.raw.exists() else ():
        run = json.loads(line)
        runs[run["way"], run["seed"]] = run
    missing = [(way, seed) for seed in range(options.seeds) for way in WAYS if (way, seed) not in runs]
    for way, seed in missing[: options.limit]:
        run = runs[way, seed] = measure(way, seed, options)
        print(json.dumps(run), flush=True)
        if options.raw is not None:
            with options.raw.open("a") as file:
                file.write(json.dumps(run) + "\n")
    if options.limit is not None and options.limit < len(missing):
        print(f"{len(missing) - options.limit} runs are missing")
        return
    of_way = {way: [runs[way, seed] for seed in range(options.seeds)] for way in WAYS}
    ways = {way: summary(of_way[way]) for way in WAYS}
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
        "difference": {way: difference(of_way[way], of_way["identical"]) for way in WAYS if WAYS[way]},
    }
    report_result(result, options.out, runs=list(runs.values()))


if __name__ == "__main__":
    main()
