"""Do several policies learn what one cannot? A game of two players, and the SQL agent, on the bundled model.

    python benchmarks/policies.py game --out results/policies                # two policies, and one for both
    python examples/sql/make_tasks.py && python benchmarks/policies.py sql --out results/policies
    python benchmarks/policies.py game --jobs 8 --threads 2 --limit-s 540        # on 16 cores, in parts

`game` (examples/cipher): the speaker must say the digit after the one it sees, the listener the digit before the one it
hears, and both are asked in the same words. `two` has a policy for each, `shared` one for both. After training, rounds
are played by the policies in their own roles (`played_own`), and in each other's (`played_swapped`).

`sql`: writer and rewriter of the agent of examples/sql as separate policies (`copies`), as adapters (`adapters`) and as
one policy (`shared`); the checker is the untrained model in all of them.

Figures are means over seeds with standard errors. `ratio` is the reward of the first variant over that of `shared`.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from reporting import add_out, report_result
from training_runs import Run, add_runs, make_runs

ROOT = Path(__file__).parents[1]
GAME = ROOT / "examples" / "cipher" / "cipher.toml"
TASKS = GAME.parent / "tasks.jsonl"
SQL = ROOT / "examples" / "sql" / "spark.toml"
FROZEN = "policies.checker.trained=false"
ADAPTER = "lora={rank=16}"
VARIANTS: dict[str, dict[str, list[str]]] = {
    "game": {"two": [], "shared": ["policies={}"]},
    "sql": {
        "copies": ["policies.writer.models=writer", "policies.rewriter.models=rewriter", FROZEN],
        "adapters": [
            *(f"policies.{role}.{key}" for role in ("writer", "rewriter") for key in (f"models={role}", ADAPTER)),
            FROZEN,
        ],
        "shared": ['policies.both.models=["writer","rewriter"]', FROZEN],
    },
}
SQL_SETTINGS = [f"agent={ROOT / 'benchmarks' / 'policies_sql.py'}:solve", "training.roles=[]"]
ROUNDS = {"own": "solve", "swapped": "solve_swapped"}
"""Who plays after training, and the function of the agent."""
LAST = 5
"""Steps whose mean reward is that of the end of a run."""


def measure(lines: list[dict[str, Any]]) -> Run:
    """Return the rewards of all steps of a run, and the held-out reward at its ends; policies have those in common."""
    first = [line for line in lines if line["policy"] == lines[0]["policy"]]
    rewards = [round(line["reward/mean"], 4) for line in first if "reward/mean" in line]
    held_out = [line["held_out/reward"] for line in first if "held_out/reward" in line]
    return {
        "rewards": rewards,
        "reward": fmean(rewards),
        "last": fmean(rewards[-LAST:]),
        **({"before": held_out[0], "after": held_out[-1]} if held_out else {}),
    }


def play(arguments: list[str], folder: Path) -> Run:
    """Play rounds with the trained policies in different roles; return the mean rewards."""
    found: Run = {}
    for name, function in ROUNDS.items():
        if name != "own" and "policies={}" in arguments:
            continue
        agent = f"agent={GAME.parent / 'agent.py'}:{function}"
        rounds = [agent, f"home={folder.parent}", "run=rounds", "evaluation.rollouts=32"]
        command = [*(sys.executable, "-m", "leyden", "eval"), *arguments, *rounds, "--tasks", str(TASKS), "--json"]
        command += ["--home", str(folder.parent), "--model", folder.name, "--step", "last"]
        printed = subprocess.run(command, capture_output=True, text=True)
        if printed.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{printed.stderr[-2000:]}")
        found[f"played_{name}"] = json.loads(printed.stdout)["reward"]
    return found


def summarise(runs: list[Run]) -> dict[str, Any]:
    """Return means over seeds, with standard errors."""
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    found = {name: [run[name] for run in runs] for name in names}
    return {
        "seeds": len(runs),
        **{name: round(fmean(values), 4) for name, values in found.items()},
        "error": {
            name: round(stdev(values) / math.sqrt(len(values)), 4) for name, values in found.items() if len(values) > 1
        },
        "seconds": round(fmean(run["seconds"] for run in runs)),
    }


def main() -> None:
    """Train every variant with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=VARIANTS)
    parser.add_argument("--variants", nargs="+", help="some of the variants (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: those of the example")
    add_runs(parser, ROOT / "results" / "policies" / "runs.jsonl")
    add_out(parser)
    given = parser.parse_args()
    variants = VARIANTS[given.task]
    chosen = given.variants or [*variants]
    config, always = (GAME, list[str]()) if given.task == "game" else (SQL, SQL_SETTINGS)
    if given.steps is not None:
        always = [*always, f"training.steps={given.steps}"]
    wanted = {
        (given.task, variant, seed, given.steps): [str(config), *always, f"seed={seed}", *variants[variant]]
        for seed in given.seeds
        for variant in chosen
    }
    inspect = play if given.task == "game" else lambda arguments, folder: {}
    runs = make_runs(("task", "variant", "seed", "steps"), wanted, measure, given, inspect)
    found = {
        variant: [runs[key] for seed in given.seeds if (key := (given.task, variant, seed, given.steps)) in runs]
        for variant in chosen
    }
    if not all(found.values()):
        raise SystemExit("no seed is finished with every variant: run the same command again")
    end = "played_own" if given.task == "game" else "after"
    means = {variant: fmean(run[end] for run in made) for variant, made in found.items()}
    result = {
        "ratio": round(means[chosen[0]] / means[chosen[-1]], 3),
        "task": given.task,
        "variants": {variant: summarise(made) for variant, made in found.items()},
    }
    report_result(result, given.out, given.task)


if __name__ == "__main__":
    main()
