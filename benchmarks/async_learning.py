"""Does staleness cost reward? The calculator agent on the bundled model at several limits, with several seeds.

    python benchmarks/async_learning.py --limits 0 1 4 --seeds 8 --out results/async_learning
    python benchmarks/async_learning.py --jobs 8 --threads 2 --limit-s 540      # on 16 cores, in parts
    python benchmarks/async_learning.py --settings training.max_staleness=0 training.flat_groups=refill --seeds 3 \\
        --out results/refill

Every variant is trained with every seed; the seeds choose tasks and samples. Figures are means over seeds: of the
reward over all training steps (`reward`) and over the first tokens, as many as every variant sampled with that seed
(`by_tokens`), of the held-out reward after the last step, and of sampled tokens. Differences are to the first variant,
seed by seed, with 95 % intervals of Student's t. `ratio` is the reward of the last variant over that of the first. Only
seeds with which every variant is finished count.
"""

import argparse
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from reporting import add_out, report_result
from training_runs import Run, add_runs, make_runs

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "calc_plain" / "calc.toml"
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20, 15: 2.13}
"""Quantiles of Student's t for two-sided intervals, by degrees of freedom."""

FIGURES = ("reward", "by_tokens", "held_out", "tokens", "flat", "staleness", "mean_staleness")


def measure(lines: list[dict[str, Any]]) -> Run:
    """Return the rewards and sampled tokens of all steps of a run, and the held-out reward at the end."""
    steps_made = [line for line in lines if line["step"] > 0]
    return {
        "rewards": [round(line["reward/mean"], 4) for line in steps_made],
        "step_tokens": [line["tokens/sampled"] for line in steps_made],
        "reward": fmean(line["reward/mean"] for line in steps_made),
        "held_out": lines[-1]["held_out/reward"],
        "tokens": sum(line["tokens/sampled"] for line in steps_made),
        "flat": sum(line["groups/flat"] for line in steps_made) / sum(line["groups/requested"] for line in steps_made),
        "staleness": max(line["staleness/max"] for line in steps_made),
        "mean_staleness": fmean(line["staleness/mean"] for line in steps_made),
    }


def reward_by_tokens(run: Run, budget: float) -> float:
    """Return the mean reward over the first `budget` sampled tokens."""
    left, total = budget, 0.0
    for reward, tokens in zip(run["rewards"], run["step_tokens"], strict=True):
        total += reward * min(tokens, left)
        left -= min(tokens, left)
    return total / budget


def difference(first: list[float], other: list[float]) -> dict[str, float]:
    """Return the mean difference of pairs, and its 95 % interval."""
    pairs = [b - a for a, b in zip(first, other, strict=True)]
    half = T_95[len(pairs) - 1] * stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
    return {"mean": round(fmean(pairs), 4), "low": round(fmean(pairs) - half, 4), "high": round(fmean(pairs) + half, 4)}


def main() -> None:
    """Train every variant with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=int, nargs="+", help="variants: values of training.max_staleness")
    parser.add_argument("--settings", nargs="+", help="variants: settings, each in one argument")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    add_runs(parser, ROOT / "results" / "async_learning" / "runs.jsonl")
    add_out(parser)
    given = parser.parse_args()
    variants = given.settings or [f"training.max_staleness={limit}" for limit in given.limits or (0, 1, 4)]
    always = [f"training.steps={given.steps}", "evaluation.every=0", f"checkpoints.every={given.steps}"]
    wanted = {
        (variant, seed, given.steps): [str(EXAMPLE), f"seed={seed}", *always, *variant.split()]
        for seed in range(given.seeds)
        for variant in variants
    }
    runs = make_runs(("settings", "seed", "steps"), wanted, measure, given)
    seeds = [seed for seed in range(given.seeds) if all((variant, seed, given.steps) in runs for variant in variants)]
    if not seeds:
        raise SystemExit("no seed is finished with every variant: run the same command again")
    found = {variant: [runs[variant, seed, given.steps] for seed in seeds] for variant in variants}
    for together in zip(*found.values(), strict=True):
        budget = min(run["tokens"] for run in together)
        for run in together:
            run["by_tokens"] = reward_by_tokens(run, budget)
    first = found[variants[0]]
    result = {
        "ratio": round(fmean(one["reward"] for one in found[variants[-1]]) / fmean(one["reward"] for one in first), 3),
        "seeds": len(seeds),
        "steps": given.steps,
        "variants": {
            variant or "default": {
                **{name: round(fmean(run[name] for run in runs), 4) for name in FIGURES},
                "difference": {
                    name: difference([run[name] for run in first], [run[name] for run in runs])
                    for name in ("reward", "by_tokens", "held_out")
                },
            }
            for variant, runs in found.items()
        },
    }
    report_result(result, given.out, runs=[run for runs in found.values() for run in runs])


if __name__ == "__main__":
    main()
