"""Ablations on the bundled model: the same agent and seeds, one choice of the method changed at a time.

    python benchmarks/ablations.py run --study air-sql --seeds 3      # one study; runs that are there are kept
    python benchmarks/ablations.py table                              # of all runs that are there

A study is an agent on spark with variants of its configuration. Every run is one file, `STUDY/VARIANT-SEED.json`: the
held-out reward after each evaluation and all metrics. Studies can be run in parts and on several machines. `table`
prints mean and standard deviation over seeds: held-out reward at the end, mean reward over all steps (how fast it
learns), and seconds; its last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import leyden
from leyden.trainer.report.metrics_log import read_metrics

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "ablations"
FAILED = {"signals": {"tool_failed": -0.3}}
AIR = {"none": {}, "signals": FAILED, "signals, stepwise": {**FAILED, "algorithm": {"credit": "stepwise"}}}
LEVELS = {level: {"algorithm": {"level": level}} for level in ("rollout", "transition")}
CREDITS = {
    "identical": FAILED,
    "stepwise": {**FAILED, "algorithm": {"credit": "stepwise"}},
    "gigpo": {**FAILED, "algorithm": {"credit": "discounted", "gamma": 0.95, "advantage": "gigpo"}},
}
ROLES = {
    "writer": {"training": {"roles": ["writer"]}},
    "writer, rewriter": {"training": {"roles": ["writer", "rewriter"]}},
    "all three": {"training": {"roles": ["writer", "checker", "rewriter"]}},
}
LAYOUTS = {layout: {"training": {"layout": layout}} for layout in ("tree", "rows")}
STUDIES: dict[str, tuple[str, dict[str, Any]]] = {
    "air-calc": ("examples/calc", AIR),
    "air-sql": ("examples/sql", AIR),
    "air-rag": ("examples/rag", AIR),
    "air-ledger": ("benchmarks/ledger", AIR),
    "level-sql": ("examples/sql", LEVELS),
    "level-rag": ("examples/rag", LEVELS),
    "credit-calc": ("examples/calc", CREDITS),
    "credit-rag": ("examples/rag", CREDITS),
    "roles-sql": ("examples/sql", ROLES),
    "layout-rag": ("examples/rag", LAYOUTS),
}


def settings_of(study: str, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what one run sets beyond its agent's configuration."""
    settings = dict(STUDIES[study][1][variant])
    size = {"steps": options.steps, "schedule": "constant", "learning_rate": options.learning_rate}
    settings["training"] = {**size, **settings.get("training", {})}
    return {**settings, "evaluation": {"every": options.evaluate_every}}


def run(study: str, variant: str, seed: int, options: argparse.Namespace) -> None:
    """Run one training and write its file."""
    path = options.out / study / f"{variant.replace(', ', '+').replace(' ', '_')}-{seed}.json"
    if path.exists():
        return
    config = ROOT / STUDIES[study][0] / "spark.toml"
    settings = settings_of(study, variant, options)
    with tempfile.TemporaryDirectory() as home:
        trained = leyden.train(config, run="ablation", home=home, seed=seed, **settings)
        rows = read_metrics(trained.folder / "metrics.jsonl", trained.policy)
    found = {
        "study": study,
        "variant": variant,
        "seed": seed,
        "settings": settings,
        "held_out": {row["step"]: row["held_out/reward"] for row in rows if "held_out/reward" in row},
        "reward": [row["reward/mean"] for row in rows if row["step"] > 0],
        "metrics": rows,
        "seconds": trained.seconds,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(f"{study} {variant} {seed}: {found['held_out']}", flush=True)


def make_tasks(folder: str) -> None:
    """Write the tasks of a study's agent, where it makes its own."""
    script = ROOT / folder / "make_tasks.py"
    if script.exists():
        subprocess.run([sys.executable, script], check=True, stdout=subprocess.DEVNULL)


def table(out: Path) -> dict[str, Any]:
    """Mean and deviation over seeds, by study and variant."""
    found: dict[str, Any] = {}
    for study, (_, variants) in STUDIES.items():
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / study).glob("*.json"))]
        for variant in variants:
            own = [one for one in runs if one["variant"] == variant]
            if not own:
                continue
            measured = {
                "held_out_after": [list(one["held_out"].values())[-1] for one in own],
                "mean_reward": [fmean(one["reward"]) for one in own],
                "seconds": [one["seconds"] for one in own],
            }
            entry = {name: summary(values) for name, values in measured.items()}
            found.setdefault(study, {})[variant] = {"seeds": len(own), **entry}
    return found


def summary(values: list[float]) -> list[float | None]:
    """Mean and standard deviation; no deviation of one value."""
    return [round(fmean(values), 3), round(stdev(values), 3) if len(values) > 1 else None]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--study", choices=tuple(STUDIES), help="one study; none: all")
    parser.add_argument("--variant", help="one variant of the study")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--evaluate-every", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "run":
        for study in [options.study] if options.study else STUDIES:
            folder, variants = STUDIES[study]
            make_tasks(folder)
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                for variant in [options.variant] if options.variant else variants:
                    run(study, variant, seed, options)
    found = table(options.out)
    for study, variants in found.items():
        for variant, entry in variants.items():
            print(f"{study:12} {variant:24} {entry}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
