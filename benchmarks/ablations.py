"""Ablations on the bundled model: the same agent and seeds, one choice of the method changed at a time.

    python benchmarks/ablations.py run --agent sql --seeds 3      # one agent; runs that are there are kept
    python benchmarks/ablations.py table                          # of all runs that are there

Every run is one file, `AGENT/VARIANT-SEED.json`: the held-out reward after each evaluation and all metrics. Agents can
be run in parts and on several machines. `table` prints mean and standard deviation over seeds (sd): held-out reward at
the end, mean reward over all steps (how fast it learns), and seconds. Its last line is one JSON object; `ratio` is the
ledger agent's held-out reward with automatic rewards and credit for single steps over that without.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from reporting import report_result

import leyden
from leyden.orchestrator.report.metrics_log import read_metrics

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "ablations"
STEPWISE = {"algorithm": {"credit": "stepwise"}}
GROUP = {"algorithm": {"credit": "stepwise", "compare": "group"}}
"""A call is compared with all calls of its group, whatever its turn."""
FAILED = {"signals": {"tool_failed": -0.3}}
SUCCEEDED = {"signals": {"tool_succeeded": 0.3}}
SIGNALS = {
    "failed": FAILED,
    "failed, stepwise": {**FAILED, **STEPWISE},
    "failed, stepwise, group": {**FAILED, **GROUP},
    "succeeded": SUCCEEDED,
    "succeeded, stepwise": {**SUCCEEDED, **STEPWISE},
    "succeeded, stepwise, group": {**SUCCEEDED, **GROUP},
}
"""Automatic rewards for calls whose tool failed, or did not fail."""
GIGPO = {**FAILED, "algorithm": {"credit": "discounted", "gamma": 0.95, "advantage": "gigpo"}}
TRANSITION = {"algorithm": {"level": "transition"}}
UNCHANGED = "unchanged"
"""The variant that an agent's other variants are compared with."""
HEADLINE = "succeeded, stepwise"
AGENTS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "calc": ("examples/calc", {**SIGNALS, "failed, gigpo": GIGPO}),
    "ledger": ("benchmarks/ledger", {**SIGNALS, "partial credit": {"reward": "agent.py:partial"}}),
    "sql": (
        "examples/sql",
        {
            **SIGNALS,
            "transition level": TRANSITION,
            "writer alone": {"training": {"roles": ["writer"]}},
            "all three roles": {"training": {"roles": ["writer", "checker", "rewriter"]}},
        },
    ),
    "rag": ("examples/rag", {**SIGNALS, "transition level": TRANSITION, "rows": {"training": {"layout": "rows"}}}),
}
"""The folder of each agent, and its variants beside `UNCHANGED`."""


def variants_of(agent: str) -> dict[str, dict[str, Any]]:
    """Return what each variant of an agent sets."""
    return {UNCHANGED: {}, **AGENTS[agent][1]}


def settings_of(agent: str, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what one run sets beyond its agent's configuration."""
    settings = dict(variants_of(agent)[variant])
    size = {"steps": options.steps, "schedule": "constant", "learning_rate": options.learning_rate}
    settings["training"] = {**size, **settings.get("training", {})}
    return {**settings, "evaluation": {"every": options.evaluate_every}}


def run(agent: str, variant: str, seed: int, options: argparse.Namespace) -> None:
    """Run one training and write its file."""
    path = options.out / agent / f"{variant.replace(', ', '+').replace(' ', '_')}-{seed}.json"
    if path.exists():
        return
    config = ROOT / AGENTS[agent][0] / "spark.toml"
    settings = settings_of(agent, variant, options)
    with tempfile.TemporaryDirectory() as home:
        trained = leyden.train(config, run="ablation", home=home, seed=seed, **settings)
        rows = read_metrics(trained.folder / "metrics.jsonl", trained.policy)
    found = {
        "agent": agent,
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
    print(f"{agent} {variant} {seed}: {found['held_out']}", flush=True)


def make_tasks(config: Path) -> None:
    """Write the tasks of an agent that makes its own, unless they are there: runs at the same time share them."""
    script, tasks = config.parent / "make_tasks.py", tomllib.loads(config.read_text(encoding="utf-8"))["tasks"]
    if script.exists() and not (config.parent / tasks).exists():
        subprocess.run([sys.executable, script], check=True, stdout=subprocess.DEVNULL)


def table(out: Path) -> dict[str, Any]:
    """Return mean and deviation over seeds, by agent and variant."""
    found: dict[str, Any] = {}
    for agent in AGENTS:
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / agent).glob("*.json"))]
        for variant in variants_of(agent):
            own = [one for one in runs if one["variant"] == variant]
            if not own:
                continue
            measured = {
                "held_out_after": [list(one["held_out"].values())[-1] for one in own],
                "mean_reward": [fmean(one["reward"]) for one in own],
                "seconds": [one["seconds"] for one in own],
            }
            entry = {name: summary(values) for name, values in measured.items()}
            found.setdefault(agent, {})[variant] = {"seeds": len(own), **entry}
    return found


def summary(values: list[float]) -> list[float | None]:
    """Mean and standard deviation; no deviation of one value."""
    return [round(fmean(values), 3), round(stdev(values), 3) if len(values) > 1 else None]


def ratio(found: dict[str, Any]) -> float | None:
    """Return the headline: what automatic rewards and credit for single steps are worth where rewards are rare."""
    ledger = found.get("ledger", {})
    with_them, without = (ledger.get(name, {}).get("held_out_after", [0.0])[0] for name in (HEADLINE, UNCHANGED))
    return round(with_them / without, 2) if with_them and without else None


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--agent", choices=tuple(AGENTS), help="one agent; none: all")
    parser.add_argument("--variant", help="one variant of the agent")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--evaluate-every", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "run":
        for agent in [options.agent] if options.agent else AGENTS:
            make_tasks(ROOT / AGENTS[agent][0] / "spark.toml")
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                for variant in [options.variant] if options.variant else variants_of(agent):
                    run(agent, variant, seed, options)
    found = table(options.out)
    for agent, variants in found.items():
        for variant, entry in variants.items():
            seeds, *measured = entry.items()
            shown = "  ".join(f"{name} {mean} (sd {deviation})" for name, (mean, deviation) in measured)
            print(f"{agent:8} {variant:26} {seeds[1]} seeds  {shown}")
    report_result({"ratio": ratio(found), **found}, options.out)


if __name__ == "__main__":
    main()
