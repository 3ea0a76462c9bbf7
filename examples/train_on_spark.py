"""Trains the agents of sql, rag and calc on the bundled model, one after the other: minutes on two cores.

    make examples

Each agent is measured on tasks held out: before training with greedy decoding, which is more than the untrained model
earns when it samples, and after training with sampling, so that a policy which only became more certain gains nothing.
The last line is one JSON object: `[before, after]` of each, and as `ratio` the smallest of after over before.
`--out FOLDER` keeps it, with the metrics and the curve of each run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from reporting import add_out, report_result

HERE = Path(__file__).parent
EXAMPLES = ("sql", "rag", "calc")


def leyden(*arguments: str | Path, **environment: str) -> Any:
    """Run a command of Leyden; what it says in JSON."""
    words = [sys.executable, "-m", "leyden", *arguments, "--json"]
    ran = subprocess.run(words, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
    return json.loads(ran.stdout)


def train(example: str, home: Path, settings: list[str]) -> dict[str, Any]:
    """Make the tasks of an example, measure, train, and measure again."""
    folder = HERE / example
    if (folder / "make_tasks.py").exists():
        subprocess.run([sys.executable, folder / "make_tasks.py"], check=True, stdout=subprocess.DEVNULL)
    config = folder / "spark.toml"
    greedy = leyden("eval", config, "--home", home, *settings, OPENAI_TEMPERATURE="0")
    trained = leyden("train", config, "--restart", f"run={example}", f"home={home}", *settings)
    return {
        "greedy_before": greedy["reward"],
        "sampled_before": trained["before"],
        "sampled_after": trained["after"],
        "steps": trained["step"],
        "seconds": round(trained["seconds"]),
    }


def main() -> None:
    """Train them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path("runs/examples"), help="the folder of the runs")
    parser.add_argument("--only", choices=EXAMPLES, help="one of them; a kept result keeps what it has of the others")
    add_out(parser)
    parser.add_argument("settings", nargs="*", help="settings of all runs, such as training.steps=2")
    options = parser.parse_args()
    kept = options.out / "benchmark.json" if options.out is not None else None
    earlier = json.loads(kept.read_text()) if options.only and kept is not None and kept.exists() else {}
    measured = earlier.get("measured", {}).get("runs", {})
    for example in [options.only] if options.only else EXAMPLES:
        measured[example] = train(example, options.home, options.settings)
        print(f"{example:5} {measured[example]}", file=sys.stderr, flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "curve.png"):
                shutil.copy(options.home / example / name, options.out / f"{example}-{name}")
    result = {
        name: [round(one[key], 3) for key in ("greedy_before", "sampled_after")] for name, one in measured.items()
    }
    ratio = round(min(after / before if before else 0.0 for before, after in result.values()), 3)
    report_result({"ratio": ratio, **result}, options.out, command=" ".join(["python", *sys.argv]), runs=measured)


if __name__ == "__main__":
    main()
