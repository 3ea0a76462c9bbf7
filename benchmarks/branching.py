"""Held-out reward against sampled tokens: GRPO, credit by sampling, and difficulty by prefixes, on the bundled model.

    python benchmarks/branching.py                                # all runs that are missing, then the table
    python benchmarks/branching.py --jobs 8 --threads 2 --limit-s 540      # the same, on 16 cores, in parts
    python benchmarks/branching.py --agents ledger --variants grpo sampled --seeds 1
    python benchmarks/branching.py --limit-s 0                    # the table of the runs that are there

Curves are means over seeds of the held-out reward at equal sampled tokens, those of continuations included and replayed
ones not. `ratio` is, for the agent and variant where it is largest, how many tokens GRPO samples until it has the
held-out reward that it ends with, over those that the variant samples for the same reward; below 1 the variant needs
more. None: never reached.
"""

import argparse
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from ablations import AGENTS, ROOT, make_tasks
from reporting import report_result
from training_runs import add_runs, make_runs

RESULTS = ROOT / "results" / "branching"
PLAIN = "grpo"
CONTINUE, SAMPLED = "training.hard_tasks=continue", "algorithm.credit=sampled"
VARIANTS: dict[str, list[str]] = {
    PLAIN: ["training.tasks_per_step=12"],
    "prefixes": [CONTINUE, "training.tasks_per_step=14"],
    "sampled": [SAMPLED, "training.tasks_per_step=8"],
    "both": [SAMPLED, CONTINUE, "training.tasks_per_step=9"],
}
"""What each sets: as many tasks that a step of each samples about as many tokens."""
STEPS = {"ledger": 28, "sql": 16}
EVERY = 4
"""Steps between evaluations."""


def arguments_of(agent: str, variant: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Return the arguments of `leyden train` for one run."""
    size = [f"training.steps={options.steps or STEPS[agent]}", f"training.learning_rate={options.learning_rate}"]
    config = str(ROOT / AGENTS[agent][0] / "spark.toml")
    every = [f"seed={seed}", f"evaluation.every={EVERY}", "training.schedule=constant"]
    return [config, *every, *size, *VARIANTS[variant]]


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
    target = float(mean_curve(of[PLAIN])[1][-1])
    plain, found = tokens_to(target, of[PLAIN]), {}
    for name, some in of.items():
        if some:
            ends, needed = [one["held_out"][-1] for one in some], tokens_to(target, some)
            found[name] = {
                "seeds": len(some),
                "held_out": round(fmean(ends), 3),
                "deviation": round(stdev(ends), 3) if len(ends) > 1 else None,
                "tokens": round(fmean(one["tokens"][-1] for one in some)),
                "tokens_to_target": needed and round(needed),
                "ratio": round(plain / needed, 2) if plain and needed else None,
                "branches": some[0]["branches"],
            }
    return {"target": round(target, 3), "variants": found}


def main() -> None:
    """Run what is missing, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=[PLAIN, "prefixes", "sampled"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"default {STEPS}")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    add_runs(parser, RESULTS / "runs.jsonl")
    options = parser.parse_args()
    for agent in options.agents:
        make_tasks(AGENTS[agent][0])
    wanted = {
        (agent, variant, seed): arguments_of(agent, variant, seed, options)
        for seed in range(options.seeds)
        for agent in options.agents
        for variant in options.variants
    }
    runs = list(make_runs(("agent", "variant", "seed"), wanted, measure, options).values())
    found = {agent: compared for agent in STEPS if (compared := compare(agent, runs))}
    others = [
        (entry["ratio"], f"{agent}, {name}")
        for agent, compared in found.items()
        for name, entry in compared["variants"].items()
        if name != PLAIN and entry["ratio"] is not None
    ]
    ratio, best = max(others, default=(None, None))
    report_result({"ratio": ratio, "best": best, **found}, options.out)


if __name__ == "__main__":
    main()
