"""Held-out reward against sampled tokens: GRPO, credit by sampling, and difficulty by prefixes, on the bundled model.

The ledger has twenty entries that must all be right: twelve routine ones, then eight questions of two steps, of which
spark at times makes only one. Its runs begin with spark after a training on routine questions alone, which is made
first. The SQL agent's rollouts are short, and half of the untrained model's succeed.

    python benchmarks/branching.py                                # all runs that are missing, then the table
    python benchmarks/branching.py --jobs 8 --threads 2 --limit-s 540      # the same, on 16 cores, in parts
    python benchmarks/branching.py --agents ledger --variants grpo sampled --seeds 1
    python benchmarks/branching.py --limit-s 0                    # the table of the runs that are there

Curves are means over seeds of the held-out reward at equal sampled tokens, those of continuations included and replayed
ones not. `ratio` is, for the agent and variant where it is largest, how many tokens GRPO samples until it has the
held-out reward that it ends with, over those that the variant samples for the same reward; below 1 the variant needs
more. `ratio_halfway` is the same for the reward halfway between GRPO's first and last. None: never reached.
"""

import argparse
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from ablations import ROOT, make_tasks
from reporting import report_result
from training_runs import add_runs, make_runs, train

RESULTS = ROOT / "results" / "branching"
START = ROOT / ".bench" / "branching"
"""Where the model is with which the ledger's runs begin."""
LEDGER = ROOT / "benchmarks" / "ledger"
LATE_ENTRIES = 8
PARTS = ("routine", "late")
CONFIGS = {"ledger": LEDGER / "late.toml", "sql": ROOT / "examples" / "sql" / "spark.toml"}
PLAIN = "grpo"
CONTINUE, SAMPLED = "training.hard_tasks=continue", "algorithm.credit=sampled"
VARIANTS: dict[str, list[str]] = {PLAIN: [], "prefixes": [CONTINUE], "sampled": [SAMPLED], "both": [SAMPLED, CONTINUE]}
SIZES = {
    "ledger": {PLAIN: (18, 2), "prefixes": (24, 2), "sampled": (12, 2), "both": (24, 2)},
    "sql": {PLAIN: (12, 12), "prefixes": (12, 14), "sampled": (12, 8), "both": (12, 9)},
}
"""Steps, and tasks of a step: such that all variants of an agent sample about as many tokens."""
EVERY = {"ledger": 6, "sql": 4}
"""Steps between evaluations."""


def arguments_of(agent: str, variant: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Return the arguments of `leyden train` for one run."""
    steps, tasks = SIZES[agent][variant]
    size = [f"training.steps={options.steps or steps}", f"training.tasks_per_step={tasks}"]
    every = [f"seed={seed}", f"evaluation.every={EVERY[agent]}", "training.schedule=constant"]
    size.append(f"training.learning_rate={options.learning_rate}")
    start = [f"model={START / 'model'}"] if agent == "ledger" else []
    return [str(CONFIGS[agent]), *start, *every, *size, *VARIANTS[variant]]


def make_start() -> None:
    """Train spark on single routine questions and export it, unless it is there."""
    if not (START / "model").exists():
        tasks = [f"tasks={LEDGER / 'routine_tasks.jsonl'}", f"held_out={LEDGER / 'routine_held_out.jsonl'}"]
        size = ["training.steps=96", "training.schedule=linear", "evaluation.every=16", "seed=0"]
        config = str(ROOT / "examples" / "calc_plain" / "calc.toml")
        if not train([config, *tasks, *size, "training.learning_rate=3e-4"], START, float("inf")):
            sys.exit(1)
        export = [sys.executable, "-m", "leyden", "export", "run", "--home", START, "--step", "last"]
        subprocess.run([*export, "--to", START / "model"], check=True)


def measure(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the curve of a run and what its continuations were."""
    tokens = accumulate(row.get("tokens/sampled", 0) for row in metrics)
    curve = [(n, row["held_out/reward"]) for n, row in zip(tokens, metrics, strict=True) if "held_out/reward" in row]
    names = ("branches/groups", "branches/diverged", "branches/reward", "tokens/branched", "tokens/replayed")
    branches = {name: found for name in names if (found := [row[name] for row in metrics if name in row])}
    return {
        "tokens": [int(until) for until, _ in curve],
        "held_out": [round(reward, 4) for _, reward in curve],
        "reward": [round(row["reward/mean"], 4) for row in metrics if "reward/mean" in row],
        "flat": [row["groups/flat"] for row in metrics if "groups/flat" in row],
        "branches": {name: round(fmean(values), 4) for name, values in branches.items()},
    }


def find_right_entries(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Return which shares of the routine and of the late entries of held-out ledgers were right in each evaluation."""
    if arguments[0] != str(CONFIGS["ledger"]):
        return {}
    rows = map(json.loads, (LEDGER / "late_held_out.jsonl").read_text(encoding="utf-8").splitlines())
    answers = {row["id"]: [str(entry["answer"]) for entry in row["entries"]] for row in rows}
    query = (
        "SELECT step, task_id, result FROM rollouts JOIN attempts ON rollouts.id = rollout_id WHERE purpose = 'eval'"
    )
    right: dict[int, list[list[bool]]] = {}
    with closing(sqlite3.connect(folder / "leyden.db")) as store:
        for step, task, result in store.execute(query):
            entries = json.loads(result) if result is not None else [None] * len(answers[task])
            right.setdefault(step, []).append(
                [found == gold for found, gold in zip(entries, answers[task], strict=True)]
            )
    shares = [np.mean(found, axis=0) for _, found in sorted(right.items())]
    return {
        "routine": [round(float(share[:-LATE_ENTRIES].mean()), 4) for share in shares],
        "late": [round(float(share[-LATE_ENTRIES:].mean()), 4) for share in shares],
    }


def mean_curve(runs: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Return numbers of sampled tokens, as far as all runs got, and the mean held-out reward after each."""
    tokens = np.linspace(0, min(one["tokens"][-1] for one in runs), 401)
    return tokens, np.mean([np.interp(tokens, one["tokens"], one["held_out"]) for one in runs], axis=0)


def tokens_to(reward: float, runs: list[dict[str, Any]]) -> float | None:
    """Return the tokens at which the mean curve of runs first has a reward; None: it does not."""
    tokens, mean = mean_curve(runs)
    there = np.flatnonzero(mean >= reward)
    return float(tokens[there[0]]) if len(there) else None


def compare(agent: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the variants of an agent."""
    of = {name: [one for one in runs if (one["agent"], one["variant"]) == (agent, name)] for name in VARIANTS}
    if not of[PLAIN]:
        return {}
    plain, found = mean_curve(of[PLAIN])[1], {}
    targets = {"ratio": float(plain[-1]), "ratio_halfway": float(plain[0] + plain[-1]) / 2}
    for name, some in of.items():
        if some:
            ends, needed = [one["held_out"][-1] for one in some], tokens_to(targets["ratio"], some)
            found[name] = {
                "seeds": len(some),
                "held_out": round(fmean(ends), 3),
                "deviation": round(stdev(ends), 3) if len(ends) > 1 else None,
                "tokens": round(fmean(one["tokens"][-1] for one in some)),
                "tokens_to_target": needed and round(needed),
                **{ratio: saved(target, of[PLAIN], some) for ratio, target in targets.items()},
                "branches": {
                    name: round(fmean(one["branches"][name] for one in some), 3)
                    for name in some[0]["branches"]
                    if all(name in one["branches"] for one in some)
                },
                **{
                    part: round(fmean(one[part][-1] for one in some), 3)
                    for part in PARTS
                    if all(part in one for one in some)
                },
            }
    return {"target": round(targets["ratio"], 3), "halfway": round(targets["ratio_halfway"], 3), "variants": found}


def saved(reward: float, plain: list[dict[str, Any]], runs: list[dict[str, Any]]) -> float | None:
    """Return how many times as many tokens the plain runs need for a reward."""
    first, second = tokens_to(reward, plain), tokens_to(reward, runs)
    return round(first / second, 2) if first and second else None


def main() -> None:
    """Run what is missing, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", choices=tuple(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=[PLAIN, "prefixes", "sampled"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of those of the agent and the variant")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    add_runs(parser, RESULTS / "runs.jsonl")
    options = parser.parse_args()
    for agent in options.agents:
        make_tasks(CONFIGS[agent])
    if "ledger" in options.agents:
        make_start()
    wanted = {
        (agent, variant, seed): arguments_of(agent, variant, seed, options)
        for seed in range(options.seeds)
        for agent in options.agents
        for variant in options.variants
    }
    runs = list(make_runs(("agent", "variant", "seed"), wanted, measure, options, find_right_entries).values())
    found = {agent: compared for agent in CONFIGS if (compared := compare(agent, runs))}
    best = {}
    for ratio in ("ratio", "ratio_halfway"):
        others = [
            (entry[ratio], f"{agent}, {name}")
            for agent, compared in found.items()
            for name, entry in compared["variants"].items()
            if name != PLAIN and entry[ratio] is not None
        ]
        best[ratio], best[f"best{ratio.removeprefix('ratio')}"] = max(others, default=(None, None))
    report_result({**best, **found}, options.out)


if __name__ == "__main__":
    main()
