"""Held-out reward against sampled tokens: GRPO, credit by sampling, and difficulty by prefixes, on the bundled model.

    python benchmarks/branching.py                                     # all runs that are missing, then the table
    python benchmarks/branching.py --agent ledger --variant grpo --seeds 1
    python benchmarks/branching.py --limit 0                           # the table of the runs that are there

Every finished run is a line of `runs.jsonl` in the folder of results and is not repeated; nor is GRPO with the seeds of
`results/ablations`, which has the same settings (`benchmarks/ablations.py`). Curves are means over seeds
of the held-out reward at equal sampled tokens, those of continuations included and replayed ones not. `ratio` is, for
the agent and variant where it is largest, how many tokens GRPO samples until it has the held-out reward that it ends
with, over those that the variant samples for the same reward; below 1 the variant needs more. None: never reached.
"""

import argparse
import json
import tempfile
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from ablations import AGENTS, ROOT, UNCHANGED, make_tasks
from ablations import RESULTS as ABLATIONS
from reporting import report_result

import leyden
from leyden.orchestrator.report.metrics_log import read_metrics

RESULTS = ROOT / "results" / "branching"
PLAIN = "grpo"
CONTINUE = {"hard_tasks": "continue"}
SAMPLED = {"credit": "sampled"}
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {"training": {"tasks_per_step": 12}},
    "prefixes": {"training": {**CONTINUE, "tasks_per_step": 14}},
    "sampled": {"algorithm": SAMPLED, "training": {"tasks_per_step": 8}},
    "both": {"algorithm": SAMPLED, "training": {**CONTINUE, "tasks_per_step": 9}},
}
"""What each sets: as many tasks that a step of each samples about as many tokens."""
STEPS = {"ledger": 28, "sql": 16}
EVERY = 4
"""Steps between evaluations."""


def run(agent: str, variant: str, seed: int, steps: int, learning_rate: float) -> dict[str, Any]:
    """Train once; return the curve and what its branches were."""
    settings, size = VARIANTS[variant], {"steps": steps, "schedule": "constant", "learning_rate": learning_rate}
    changes = {**settings, "training": {**size, **settings["training"]}}
    config = ROOT / AGENTS[agent][0] / "spark.toml"
    with tempfile.TemporaryDirectory() as home:
        trained = leyden.train(config, run="branching", home=home, seed=seed, evaluation={"every": EVERY}, **changes)
        rows = read_metrics(trained.folder / "metrics.jsonl", trained.policy)
    return row_of(agent, variant, seed, rows, round(trained.seconds))


def row_of(agent: str, variant: str, seed: int, metrics: list[dict[str, Any]], seconds: int) -> dict[str, Any]:
    """Return the curve of a run and what its continuations were."""
    tokens = accumulate(row.get("tokens/sampled", 0) for row in metrics)
    curve = [(n, row["held_out/reward"]) for n, row in zip(tokens, metrics, strict=True) if "held_out/reward" in row]
    names = ("branches/groups", "branches/diverged", "branches/reward", "tokens/branched", "tokens/replayed")
    branches = {name: found for name in names if (found := [row[name] for row in metrics if name in row])}
    return {
        "agent": agent,
        "variant": variant,
        "seed": seed,
        "tokens": [int(until) for until, _ in curve],
        "held_out": [round(reward, 4) for _, reward in curve],
        "reward": [round(row["reward/mean"], 4) for row in metrics if "reward/mean" in row],
        "flat": [row["groups/flat"] for row in metrics if "groups/flat" in row],
        "branches": {name: round(fmean(values), 4) for name, values in branches.items()},
        "seconds": seconds,
    }


def known_runs(raw: Path) -> list[dict[str, Any]]:
    """Return the runs that are there."""
    runs = [json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()] if raw.exists() else []
    for agent in STEPS:
        for path in sorted((ABLATIONS / agent).glob(f"{UNCHANGED}-*.json")):
            one = json.loads(path.read_text(encoding="utf-8"))
            if len(one["reward"]) == STEPS[agent]:
                runs.append(row_of(agent, PLAIN, one["seed"], one["metrics"], round(one["seconds"])))
    return runs


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
    parser.add_argument("--agent", choices=tuple(STEPS), help="one agent; none: all")
    parser.add_argument("--variant", choices=tuple(VARIANTS), help="one variant; none: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"steps of GRPO; default {STEPS}")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--limit", type=int, help="stop after this many new runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    raw = options.out / "runs.jsonl"
    runs = known_runs(raw)
    done = {(one["agent"], one["variant"], one["seed"]) for one in runs}
    agents, variants = (
        ([options.agent] if options.agent else STEPS),
        ([options.variant] if options.variant else VARIANTS),
    )
    wanted = [(agent, variant, seed) for agent in agents for seed in range(options.seeds) for variant in variants]
    for agent, variant, seed in [one for one in wanted if one not in done][: options.limit]:
        make_tasks(AGENTS[agent][0])
        runs.append(run(agent, variant, seed, options.steps or STEPS[agent], options.learning_rate))
        with raw.open("a", encoding="utf-8") as file:
            file.write(json.dumps(runs[-1]) + "\n")
        print(json.dumps(runs[-1]), flush=True)
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
